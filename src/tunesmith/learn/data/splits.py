"""Parts of a split: ``train[:200]``, ``train[90%:]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_END = r"-?\d+(?:_\d+)*|(?:\d+\.?\d*|\.\d+)%"
_PART = re.compile(
    rf"\s*(?P<split>[^\[\]]+?)\s*\[\s*(?P<start>{_END})?\s*:\s*(?P<stop>{_END})?\s*\]\s*"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive rows, as in a Python slice. An end is a row number, a share such as ``90%``, or
    empty."""

    start: str = ""
    stop: str = ""

    def rows(self, count: int) -> slice:
        """The slice of ``count`` rows; shares are rounded to whole rows."""
        return slice(_row(self.start, count), _row(self.stop, count))

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]"


def _row(end: str, count: int) -> int | None:
    if not end:
        return None
    return round(float(end[:-1]) / 100 * count) if end.endswith("%") else int(end)


def parse_split(text: str) -> tuple[str, Cut | None]:
    """The split, and the part of it that is meant; None for all of it, and for what only
    ``datasets`` reads.

    Example:
        >>> parse_split("train[:90%]")
        ('train', Cut(start='', stop='90%'))
    """
    match = _PART.fullmatch(text)
    if not match:
        return text, None
    return match["split"], Cut(match["start"] or "", match["stop"] or "")
