"""A decoder with a scalar head: a reward model, or the critic of PPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from tunesmith.errors import ModelError
from tunesmith.models.decoder import Decoder
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.score_heads import add_score_head
from tunesmith.models.weight_checks import Differences
from tunesmith.plan.facts.families import family
from tunesmith.types import Sample


def whole_sequence(token_ids: Sequence[int]) -> Sample:
    """A sample with one prediction: the score of ``token_ids``, computed at the last of them.

    A forest predicts each target from the row before it, so the sample gets one extra token, which
    nothing reads.
    """
    return Sample([*token_ids, token_ids[-1]], [False] * len(token_ids) + [True], stand_ins=1)


@dataclass(slots=True)
class ScoreModel(Decoder):
    """A Hugging Face ``AutoModelForSequenceClassification`` with one label.

    If it is loaded from a language model, its head starts at zero, so every initial score is 0.
    """

    auto: ClassVar[Any] = AutoModelForSequenceClassification
    settings: ClassVar[dict[str, Any]] = {"num_labels": 1}

    @classmethod
    def check(cls, path: str | Path, config: Any) -> None:
        if family(config.model_type).multimodal:
            raise ModelError(
                f"'{path}' is a multimodal {config.model_type}, and a score head stands on a text "
                "model, so it cannot be a reward model or a critic. Choose a text model, or for "
                "the policy an estimator without a critic, such as grpo",
                keys=("algorithm.name",),
            )
        add_score_head(config)
        if is_trained(config) and config.num_labels != 1:
            raise ModelError(f"'{path}' has {config.num_labels} labels; a score model has one")

    @classmethod
    def weight_differences(cls, config: Any) -> Differences:
        """A language model's files lack the score head, whatever its family calls it, and have a
        vocabulary head."""
        new = (("score.", "classif"), ("lm_head.", "embed_out."))
        return ((), ()) if is_trained(config) else new

    def complete(self, config: Any) -> None:
        if not is_trained(config):
            nn.init.zeros_(self.head.weight)
        # transformers needs it to find a sequence's last token.
        if self.module.config.pad_token_id is None:
            pad = self.tokenizer.pad_token_id
            eos = self.tokenizer.eos_token_id
            self.module.config.pad_token_id = eos if pad is None else pad

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, self.module.score)

    def scores(self, forest: Forest) -> Tensor:
        """Scores ``[N]``, at the row before each of the forest's targets.

        They are computed in at least float32: rounded to bfloat16, scores from 4 to 8 would be
        multiples of 1/32.
        """
        states = self.states(forest)
        wide = torch.promote_types(states.dtype, torch.float32)
        bias: Tensor | None = getattr(self.head, "bias", None)
        bias = bias if bias is None else bias.to(wide)
        return functional.linear(states.to(wide), self.head.weight.to(wide), bias).squeeze(1)

    def predict(self, forest: Forest) -> Predictions:
        return Predictions(values=self.scores(forest))

    @property
    def context(self) -> int | None:
        """The number of positions that the model has."""
        return getattr(self.module.config, "max_position_embeddings", None)


def is_trained(config: Any) -> bool:
    """Whether a checkpoint has a score head."""
    return any("ForSequenceClassification" in name for name in config.architectures or ())
