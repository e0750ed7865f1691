"""Columns whose meaning is known from other frameworks and that nothing here reads.

A line that has one would be learned as something else than it says: images as text, a bad answer as
a good one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunesmith.errors import shortened
from tunesmith.learn.data.sources import SourceRow

MEDIA = (
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "pixel_values",
    "image_url",
    "image_path",
)
WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight")


def check_unread(row: SourceRow, goal: str, kind: str) -> None:
    """Raise BadLine for a column that changes what the line means and is not read.

    Args:
        goal, kind: the run's goal, and the kind of the row's format.
    """
    for names, matters, problem in _columns(goal, kind):
        for name in names:
            value = row.columns.get(name)
            if value not in (None, "", [], {}) and matters(value):
                raise row.bad(f"the column '{name}' ({shortened(repr(value), 40)}) {problem}")


def _columns(goal: str, kind: str) -> list[tuple[tuple[str, ...], Callable[[Any], bool], str]]:
    """Names of columns, whether a value of theirs matters, and what to do."""
    rules: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (
            MEDIA,
            _always,
            "is not read: only text is trained. Leave the line out, or drop the column to train its text",
        ),
        (
            ("chat_template_kwargs",),
            _always,
            "is not read by line: set data.chat_template_kwargs for all lines, and drop the column",
        ),
    ]
    if kind in ("text", "tagged"):
        rules.append(
            (
                ("tools",),
                _always,
                "needs a conversation: plain text has no place for tools. Drop the column",
            )
        )
    if goal != "rl":
        rules.append(
            (
                WEIGHTS,
                _is_weight,
                "is not read: every line counts alike. Give sources weights, or drop the column",
            )
        )
    if goal == "sft":
        rules.append(
            (
                ("label",),
                lambda value: value is False,
                "says that the answer is bad, and sft would learn it: train with tunesmith kto, or leave the line out",
            )
        )
    return rules


def _always(value: Any) -> bool:
    del value
    return True


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 1
