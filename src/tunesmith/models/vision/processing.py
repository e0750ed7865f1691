"""Reading images, and what their tower takes of them. Pillow is imported on use.

The processor is the checkpoint's, on Pillow: the results are the same wherever Pillow runs, whether
torchvision is installed or not.
"""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunesmith.errors import ConfigError, DataError, ModelError, boundary
from tunesmith.models.vision.kept import KeptImages
from tunesmith.models.vision.rows import FIRST_ROW, Image, ImageRows, digest_of, rows_in
from tunesmith.plan.facts.families import family

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from torch import Tensor

MOST_PIXELS = 1 << 26
"""A larger picture is refused: its file may be small and its pixels more than the memory."""
LONGEST = 200
"""Times the shorter side; towers take no longer ones."""


class Pixels(Protocol):
    """What a tower takes of one picture."""

    def grid(self, picture: Picture) -> tuple[int, int]:
        """The rows of features that the tower makes of a picture, down and across."""
        ...

    def of(self, picture: Picture) -> tuple[Tensor, ...]:
        """The tower's arguments."""
        ...

    def scaled(self, picture: Picture) -> Picture:
        """A picture in the size of the tower's arguments."""
        ...


class Patches:
    """The patches of a picture at its own resolution (Qwen)."""

    def __init__(self, path: str) -> None:
        self._processor = _processor_of(path)

    def grid(self, picture: Picture) -> tuple[int, int]:
        """See ``Pixels``."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        unit = self._processor.patch_size * self._processor.merge_size
        size = self._processor.size
        height, width = smart_resize(
            picture.height,
            picture.width,
            factor=unit,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return height // unit, width // unit

    def of(self, picture: Picture) -> tuple[Tensor, ...]:
        """Patches, and the grid of patches ``(time, down, across)``."""
        made = self._processor(images=[picture], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def scaled(self, picture: Picture) -> Picture:
        """See ``Pixels``."""
        unit = self._processor.patch_size * self._processor.merge_size
        down, across = self.grid(picture)
        return picture.resize((across * unit, down * unit), self._processor.resample)


class Squares:
    """Pictures scaled to one square (Gemma 3).

    Args:
        side: the rows of features of each, down and across.
    """

    def __init__(self, path: str, side: int) -> None:
        self._processor = _processor_of(path)
        self._side = side
        if self._processor.do_pan_and_scan:
            raise ModelError(
                f"the image processor of '{path}' cuts pictures up (do_pan_and_scan), and they are "
                "seen whole here: set it to false in preprocessor_config.json"
            )

    def grid(self, picture: Picture) -> tuple[int, int]:  # noqa: ARG002
        """See ``Pixels``."""
        return self._side, self._side

    def of(self, picture: Picture) -> tuple[Tensor, ...]:
        """See ``Pixels``."""
        return (self._processor(images=[picture], return_tensors="pt")["pixel_values"],)

    def scaled(self, picture: Picture) -> Picture:
        """See ``Pixels``."""
        size = self._processor.size
        return picture.resize((size["width"], size["height"]), self._processor.resample)


def _processor_of(path: str) -> Any:
    from transformers import AutoImageProcessor

    with boundary(ModelError, f"cannot load the image processor of '{path}'", Exception):
        return AutoImageProcessor.from_pretrained(path, backend="pil")


@dataclass(slots=True)
class ImageVocabulary:
    """What a tokenizer of a model with a tower knows beside its tokens: the images of the data.

    It is filled as the data is read, and read by the model.
    """

    path: str
    """The model's."""
    placeholder: int
    """The token that stands for an image in a text."""
    side: int | None = None
    """The rows of features of every image, down and across; None: an image has its own."""
    mark: str = ""
    """What a chat template writes for an image; empty: the placeholder."""
    written: str = ""
    """What stands in a text for each ``mark``."""
    rows: ImageRows = field(default_factory=ImageRows)
    towers: dict[Hashable, object] = field(default_factory=dict[Hashable, object], repr=False)
    """The towers that compute the images' features; a policy and its reference share one."""
    closed: str = "only those of the data are, in this command"
    """Why an image that comes while the run goes on is not seen; empty: it is."""
    kept: KeptImages | None = None
    """Keeps images whose bytes came with the data or a request; None: they stay in memory."""
    _pixels: Pixels | None = field(default=None, repr=False)

    @property
    def pixels(self) -> Pixels:
        if self._pixels is None:
            _require_pillow()
            self._pixels = Squares(self.path, self.side) if self.side else Patches(self.path)
        return self._pixels

    def rendered(self, text: str) -> str:
        """A chat template's text with what stands for each image."""
        return text.replace(self.mark, self.written) if self.mark else text

    def add(self, name: str, source: Path | bytes) -> Image:
        """An image of the data, which is opened and checked.

        Raises:
            DataError: there is none, or it cannot be used.
        """
        if isinstance(source, Path):
            with boundary(DataError, f"cannot read the image '{name}'", OSError):
                data = source.read_bytes()
        else:
            data = source
        digest = digest_of(data)
        known = self.rows.known(digest)
        if known is not None:
            if self.kept is not None and self.kept.has(known.source):
                self.kept.put(digest, data)  # it may have made room for others
            return known
        grid = self.pixels.grid(picture_of(name, data))
        if self.kept is not None and isinstance(source, bytes):
            source = self.kept.put(digest, data)
        return self.rows.add(name, source, digest, grid)

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[Image], mask: Sequence[bool] = ()
    ) -> tuple[list[int], list[bool]]:
        """Tokens with the rows of each image in place of its placeholder, and the mask of loss,
        which is never on an image.

        Raises:
            DataError: there are more placeholders than images, or fewer.
        """
        count = token_ids.count(self.placeholder)
        if count != len(images):
            raise DataError(
                f"{len(images)} images and {count} places for them in the text; give each image "
                'one place: a part {"type": "image"} of a message, or none at all, and they come '
                "before the first question"
            )
        ids: list[int] = []
        kept: list[bool] = []
        left = iter(images)
        for at, token in enumerate(token_ids):
            new = next(left).token_ids if token == self.placeholder else (token,)
            learned = bool(mask and mask[at]) and token != self.placeholder
            ids.extend(new)
            kept.extend([learned] * len(new))
        return ids, kept

    def shown(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens as the tokenizer knows them: each image is one placeholder."""
        if not rows_in(token_ids):
            return list(token_ids)
        words = self.words(token_ids)
        return [self.placeholder if isinstance(word, Image) else word for word in words]

    def words(self, token_ids: Sequence[int]) -> Iterator[int | Image]:
        """Tokens, and each image once, in its place."""
        left = iter(token_ids)
        for token in left:
            if token < FIRST_ROW:
                yield token
                continue
            image = self.rows.at(token)
            yield image
            for _ in range(len(image) - 1):
                next(left, None)

    def scaled(self, image: Image) -> Picture:
        """An image in the size in which the tower sees it."""
        return self.pixels.scaled(picture_of(image.name, image.read()))

    def arguments(self, image: Image) -> tuple[Tensor, ...]:
        """What the tower takes of an image."""
        return self.pixels.of(picture_of(image.name, image.read()))


def picture_of(name: str, data: bytes) -> Picture:
    """The picture in a file's bytes, upright, in colour.

    Raises:
        DataError: it is none, damaged, animated, too large or too long.
    """
    from PIL import Image as pillow
    from PIL import ImageOps

    many = f"'{name}' has more pixels than the {MOST_PIXELS} that are read; scale it down"
    what = f"'{name}' is not an image that Pillow reads, such as PNG, JPEG or WebP"
    # Damaged files let Pillow's readers fail in any way.
    bomb = pillow.DecompressionBombError
    with boundary(DataError, what, Exception), boundary(DataError, many, bomb):
        opened = pillow.open(io.BytesIO(data))
        # Phones save a photo and its preview as MPO.
        frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
    width, height = opened.size
    problem = ""
    if frames > 1:
        problem = f"is animated ({frames} frames); save the frame that is meant as an image"
    elif width * height > MOST_PIXELS:
        problem = f"has {width} × {height} pixels, at most {MOST_PIXELS} are read; scale it down"
    elif max(width, height) > LONGEST * min(width, height):
        problem = f"is {width} × {height}, more than {LONGEST} times as long as wide; crop it"
    elif opened.mode.startswith(("I", "F")):
        problem = "has more than 8 bits per channel, which would be cut off; save it with 8 bits"
    if problem:
        raise DataError(f"'{name}' {problem}")
    with boundary(DataError, f"'{name}' is damaged", Exception):
        return ImageOps.exif_transpose(opened).convert("RGB")


def _require_pillow() -> None:
    if find_spec("PIL") is None:
        raise ConfigError(
            "the data has images, which are read with Pillow: pip install 'tunesmith[images]'"
        )


def vocabulary_of(tokenizer: object) -> ImageVocabulary | None:
    """The images that a tokenizer has ids for; None if its model reads text alone."""
    return getattr(tokenizer, "image_vocabulary", None)


def image_rows(tokenizer: object) -> ImageRows | None:
    """The images of which a tokenizer has made ids; None if its model reads text alone."""
    vocabulary = vocabulary_of(tokenizer)
    return vocabulary and vocabulary.rows


def attach_vocabulary(tokenizer: Any, path: str, config: Any) -> None:
    """Give the tokenizer of a model with a tower a vocabulary of images.

    Args:
        config: the model's.
    """
    if not family(config.model_type).images:
        return
    vocabulary = ImageVocabulary(path, int(config.image_token_id))
    if config.model_type == "gemma3":
        ids = [config.boi_token_id, config.image_token_id, config.eoi_token_id]
        begin, row, end = tokenizer.convert_ids_to_tokens(ids)
        vocabulary.side = isqrt(config.mm_tokens_per_image)
        vocabulary.mark = begin
        vocabulary.written = f"\n\n{begin}{row}{end}\n\n"
    vars(tokenizer)["image_vocabulary"] = vocabulary
