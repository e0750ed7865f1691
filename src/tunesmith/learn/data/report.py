"""The outcome for every line of a data source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tunesmith.errors import DataError
from tunesmith.learn.data.sources import BadLine
from tunesmith.records.storage import write_output

SkipKind = Literal["bad", "too_long"]
OUTCOMES = {"bad": "bad and skipped", "too_long": "too long and skipped", "truncated": "truncated"}


class TooLong(DataError):
    """A line has more tokens than allowed and may not be cut. The message is the reason, without
    the place."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A skipped line, with its location and the reason."""

    where: str
    kind: SkipKind
    reason: str


@dataclass(slots=True)
class LoadReport:
    """Counts and lists of the lines of one load.

    ``formats`` has a sentence per file; ``notes`` are facts about the data or the template that the
    user should know.
    """

    skip_bad: bool = False
    skip_too_long: bool = False
    read: int = 0
    left_out: int = 0
    """Rows that ``data.map`` left out."""
    kept: int = 0
    truncated: int = 0
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    formats: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @contextmanager
    def line(self, where: str) -> Generator[None]:
        """Process one line: a ``DataError`` inside makes it a bad line or one that is too long.

        Raises:
            DataError: such lines are not to be skipped.
        """
        try:
            yield
        except TooLong as error:
            if not self.skip_too_long:
                raise DataError(
                    f"{where}: {error}. Raise the limit, or set data.too_long to skip, "
                    "truncate_left or truncate_right."
                ) from None
            self.skipped.append(Skipped(where, "too_long", str(error)))
        except DataError as error:
            reason = error.reason if isinstance(error, BadLine) else str(error)
            if not self.skip_bad:
                # before the first usable line, skipping might skip them all
                skips = " (data.skip_bad = true skips such lines and lists them.)"
                end = "" if reason.endswith("?") else "."
                raise DataError(f"{where}: {reason}{end}{skips if self.formats else ''}") from error
            self.skipped.append(Skipped(where, "bad", reason))

    def nothing_left(self, path: str) -> DataError:
        """The error for a source without a usable line."""
        if not self.read:
            return DataError(f"{path}: empty, there is no line of data in it.")
        return DataError(f"{path}: no usable line.\n{self.summary()}")

    def note(self, text: str | None) -> None:
        if text and text not in self.notes:
            self.notes.append(text)

    @property
    def counts(self) -> dict[str, int]:
        """``read``, ``kept``, ``truncated``, and skipped lines by kind."""
        kinds = Counter(skip.kind for skip in self.skipped)
        skipped = {"bad": kinds["bad"], "too_long": kinds["too_long"]}
        return {"read": self.read, "kept": self.kept, "truncated": self.truncated, **skipped}

    def summary(self, reasons: int = 3) -> str:
        """A few lines of text: formats, counts, the first skipped lines with their reasons, and
        notes."""
        counts = self.counts
        tail = "".join(f", {counts[key]} {text}" for key, text in OUTCOMES.items() if counts[key])
        lines = [*self.formats, f"{self.kept} of {self.read} lines used{tail}"]
        lines += [f"  {skip.where}: {skip.reason}" for skip in self.skipped[:reasons]]
        if len(self.skipped) > reasons:
            lines.append(f"  and {len(self.skipped) - reasons} more")
        return "\n".join([*lines, *self.notes])

    def write_skipped(self, path: Path) -> None:
        """Write skipped lines as JSON Lines (``where``, ``kind``, ``reason``); no file is written
        if there are none."""
        if self.skipped:
            text = "".join(json.dumps(asdict(skip)) + "\n" for skip in self.skipped)
            write_output(path, text.encode(), private=True)
