"""Prompts with images for vLLM.

vLLM gets the images with a prompt in which each is one placeholder, and writes the placeholder's
rows itself: ``check`` compares what it has written with the tokens that are trained. Images come to
it in the size in which the trainer's tower sees them, so that it has nothing to scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.errors import EngineError
from tunesmith.models.vision.processing import ImageVocabulary
from tunesmith.models.vision.rows import FIRST_ROW, Image, rows_in


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Args: vocabulary: of the run's images, or of those that another process has sent."""

    vocabulary: ImageVocabulary

    def shown(self, token_ids: Sequence[int]) -> list[int]:
        """See ``ImageVocabulary.shown``."""
        return self.vocabulary.shown(token_ids)

    def prompt(self, token_ids: Sequence[int]) -> dict[str, object]:
        """What vLLM takes of a prompt."""
        shown: dict[str, object] = {"prompt_token_ids": self.shown(token_ids)}
        if not rows_in(token_ids):
            return shown
        images = [word for word in self.vocabulary.words(token_ids) if isinstance(word, Image)]
        return shown | {
            "multi_modal_data": {"image": [self.vocabulary.scaled(image) for image in images]},
            # By which vLLM keeps their features.
            "multi_modal_uuids": {"image": [image.digest.hex() for image in images]},
        }

    def check(self, token_ids: Sequence[int], written: Sequence[int]) -> None:
        """Args: written: the prompt as vLLM has computed it.

        Raises:
            EngineError: it is not the one that is trained.
        """
        wanted = [t if t < FIRST_ROW else self.vocabulary.placeholder for t in token_ids]
        if wanted != list(written):
            raise EngineError(
                f"vLLM makes {len(written)} tokens of a prompt with images that has {len(wanted)} "
                'in training: set system.engine = "local"'
            )
