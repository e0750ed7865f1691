"""Ids for the rows of images' features: a vocabulary that continues behind the tokenizer's.

A model sees an image as a number of rows of features, in the places of placeholder tokens. Each row
of each image of a run's data has an id of its own, from ``FIRST_ROW`` on. A prompt with images thus
stays one list of ids: it is counted, cut, packed, shared by a group and looked up like any other,
and two prompts that differ only in their images are different prompts.

Shape legend: ``T`` tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tunesmith.errors import DataError, boundary

Ints = npt.NDArray[np.int64]

FIRST_ROW = 1 << 30
"""The id of the first row; no vocabulary is that large."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of the data, as a grid of rows of features."""

    name: str
    """For messages: its path, or where its bytes stand."""
    source: Path | bytes
    digest: bytes
    """The digest of the file's bytes."""
    height: int
    width: int
    first: int
    """The id of its first row."""

    def __len__(self) -> int:
        return self.height * self.width

    @property
    def token_ids(self) -> range:
        return range(self.first, self.first + len(self))

    def read(self) -> bytes:
        """The bytes of its file.

        Raises:
            DataError: the file is gone, or has changed since the data was read.
        """
        if isinstance(self.source, bytes):
            return self.source
        with boundary(DataError, f"cannot read the image {self.source}", OSError):
            data = self.source.read_bytes()
        if digest_of(data) != self.digest:
            raise DataError(
                f"the image {self.source} has changed since the data was read; start the run again"
            )
        return data


def digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class ImageRows:
    """The images of a run's data, in the order in which they were met, each once."""

    def __init__(self) -> None:
        self._images: list[Image] = []
        self._firsts = array("q")
        self._known: dict[bytes, Image] = {}
        self._stop = FIRST_ROW

    def __len__(self) -> int:
        return len(self._images)

    def known(self, digest: bytes) -> Image | None:
        """The image with these bytes, if it was added."""
        return self._known.get(digest)

    def add(self, name: str, source: Path | bytes, digest: bytes, grid: tuple[int, int]) -> Image:
        """Give a new image the next ids. Args: grid: its rows of features, down and across."""
        image = Image(name, source, digest, *grid, self._stop)
        self.extend([image])
        return image

    def extend(self, images: Iterable[Image]) -> None:
        """Add images as another process knows them, in their order."""
        for image in images:
            assert image.first == self._stop, "the processes of a run know the same images"
            self._images.append(image)
            self._firsts.append(image.first)
            self._known[image.digest] = image
            self._stop += len(image)

    @property
    def all(self) -> Sequence[Image]:
        return self._images

    def at(self, token_id: int) -> Image:
        """The image that has a row with this id."""
        if not FIRST_ROW <= token_id < self._stop:
            raise DataError(
                f"the id {token_id} is a row of an image of other data than was read here"
            )
        return self._images[bisect_right(self._firsts, token_id) - 1]

    def places(self, token_ids: Ints) -> tuple[Ints, Ints, Ints]:
        """For row ids: each row's position down and across in its image, and the image's height and
        width, ``[2, rows]``."""
        index = np.searchsorted(np.array(self._firsts), token_ids, "right") - 1
        seen, inverse = np.unique(index, return_inverse=True)  # a few of all images
        images = [self._images[number] for number in seen.tolist()]
        sizes = np.array([(i.first, i.height, i.width) for i in images], np.int64)
        first, height, width = sizes[inverse].T
        offset = token_ids - first
        return offset // width, offset % width, np.stack((height, width))

    def blocks(self, token_ids: Ints) -> Ints | None:
        """``[T]``: numbers the places of images among tokens; -1 where there is text. None: there
        is only text."""
        rows = token_ids >= FIRST_ROW
        if not rows.any():
            return None
        down, across, _ = self.places(token_ids[rows])
        begins = np.zeros(len(token_ids), np.int64)
        begins[rows] = (down == 0) & (across == 0)
        return np.where(rows, begins.cumsum(), -1)

    def positions(
        self, token_ids: Ints, positions: Ints, segments: Sequence[tuple[int, int, int]]
    ) -> npt.NDArray[np.int64]:
        """The rotary positions ``[3, T]`` (time, down, across) of the tokens of a forest.

        An image begins at the next position of the text before it. Its rows have their places in
        the grid, and the text after it continues behind the longer side of the grid.

        Args:
            token_ids: ``[T]``.
            positions: ``[T]``, each token's place in its sequence.
            segments: the forest's: start, length and parent.
        """
        rotary = np.repeat(positions[None], 3, 0)
        rows = np.flatnonzero(token_ids >= FIRST_ROW)
        if not len(rows):
            return rotary
        down, across, (height, width) = self.places(token_ids[rows])
        ends = (down == height - 1) & (across == width - 1)
        shrink = np.zeros(len(token_ids) + 1, np.int64)
        shrink[1 + rows[ends]] = (height * width - np.maximum(height, width))[ends]
        before = np.cumsum(shrink)[:-1]  # by the images that ended before a token of the forest
        ended: list[int] = []  # at each segment's end, by the images of its sequence alone
        for start, length, parent in segments:
            own = before[start : start + length]
            carried = (ended[parent] if parent >= 0 else 0) - (own[0] if length else 0)
            own += carried
            ended.append(int(own[-1] + shrink[start + length]) if length else carried)
        rotary -= before
        rotary[:, rows] -= down * width + across
        rotary[1, rows] += down
        rotary[2, rows] += across
        return rotary


@dataclass(slots=True)
class UnsentImages:
    """The images that another process does not know yet."""

    rows: ImageRows | None
    """None: there are none."""
    _sent: int = field(default=0, init=False)

    def take(self) -> Sequence[Image]:
        """The images to send now; each is sent once."""
        if self.rows is None:
            return ()
        new = self.rows.all[self._sent :]
        self._sent += len(new)
        return new


def rows_in(token_ids: Sequence[int]) -> bool:
    """Whether there are rows of images among the tokens of a prompt."""
    return max(token_ids, default=0) >= FIRST_ROW


def next_cut(token_ids: Sequence[int], start: int, most: int) -> int:
    """The place of the last cut up to ``start + most`` that goes through no image; behind an image
    that begins at ``start`` and is longer."""
    place = min(len(token_ids), start + most)
    while splits_image(token_ids, place):
        place -= 1
    if place <= start:
        place = start + 1
        while splits_image(token_ids, place):
            place += 1
    return place


def splits_image(token_ids: Sequence[int], at: int) -> bool:
    """Whether a cut before a token goes through an image, or between two that follow each other."""
    inside = 0 < at < len(token_ids) and token_ids[at - 1] >= FIRST_ROW
    return inside and token_ids[at] == token_ids[at - 1] + 1
