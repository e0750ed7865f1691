"""Text for a terminal: control characters are escaped, and paths are short."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunesmith.records.plain import Row

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""All control characters except tab and newline, and marks that change the direction of text."""


def printable(text: str) -> str:
    """Control characters as their escapes: ``\\x1b[31m`` is printed as five characters and sets no
    colour."""
    return _CONTROL.sub(lambda mark: mark[0].encode("unicode_escape").decode(), text)


_begun_in: list[str] = []
"""The working directories of the commands that this process runs, before user code changes it."""


@contextmanager
def shown_from(here: str) -> Generator[None]:
    """Paths are shown relative to a directory, wherever user code goes meanwhile."""
    _begun_in.append(here)
    try:
        yield
    finally:
        _begun_in.pop()


def shown_path(path: Path | str) -> str:
    """Relative to the working directory if it is below it, else unchanged."""
    text = str(path)
    here = _begun_in[-1] if _begun_in else os.getcwd()
    return text[len(here) + 1 :] if here != "/" and text.startswith(here + "/") else text


def width() -> int:
    """Columns of the terminal; 80 if there is none."""
    return shutil.get_terminal_size().columns


def one_line(text: str, most: int) -> str:
    """A text in one line of at most ``most`` characters; a longer one loses its middle."""
    line = printable(" ".join(text.split()))
    if len(line) <= most:
        return line
    head = (most - 1) * 2 // 3
    return f"{line[:head]}…{line[len(line) - (most - 1 - head) :]}"


def beside_or_below(first: str, second: str, columns: int | None) -> str:
    """Two texts in one line if both fit, otherwise the second one wrapped below the first.

    Args:
        columns: the line width; None: no limit, as in a file.
    """
    if not second:
        return first.rstrip()
    line = f"{first}  {second}"
    if columns is None or len(line) <= columns:
        return line
    below = textwrap.fill(second, columns - 4, break_on_hyphens=False)
    return f"{first.rstrip()}\n{textwrap.indent(below, '    ')}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of texts as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(map(printable, row), widths, strict=True)
        yield "  ".join(text.ljust(width) for text, width in cells).rstrip()


def last_message(prompt: str | list[Row]) -> str:
    """A prompt's text, or the last message of a conversation."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1].get("content") or "") if prompt else ""


def first_and_last(lines: Iterable[Row]) -> list[tuple[Row, Row]]:
    """For each prompt in both the first and the last evaluation: its line in each."""
    by_step: dict[int, dict[str, Row]] = {}
    for line in lines:
        by_step.setdefault(line["step"], {})[str(line.get("task"))] = line
    if len(by_step) < 2:
        return []
    first = by_step[min(by_step)]
    last = by_step[max(by_step)]
    return [(first[task], last[task]) for task in first if task in last]


def answers_shown(best: Row, worst: Row) -> str:
    """Two answers to one prompt, lines of ``rollouts.jsonl``, each with its reward."""
    columns = width()
    asked = f"sample of step {best['step']}, {printable(str(best['task']))}:"
    lines = [f"{asked} {one_line(last_message(best['prompt']), max(20, columns - len(asked) - 1))}"]
    for line in (best, worst):
        label = f"  reward {line['reward']:.3g}"
        lines.append(f"{label:14} {one_line(line['completion'], columns - 16)}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class EvalExample:
    """A held-out prompt, and its (answer, reward) before and after training."""

    prompt: str
    before: tuple[str, float | None]
    after: tuple[str, float | None]

    def lines(self) -> list[str]:
        room = width() - 26
        rows = [f"  {one_line(self.prompt, width() - 2)}"]
        for name, (answer, reward) in (("before", self.before), ("after", self.after)):
            judged = "failed" if reward is None else f"reward {reward:.3g}"
            rows.append(f"    {name:6}  {judged:12}  {one_line(answer, room)}")
        return rows
