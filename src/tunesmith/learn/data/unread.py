"""Columns whose meaning is known from other frameworks and that nothing here reads.

A line that has one would be learned as something else than it says: images as text, a bad answer as
a good one.
"""

from __future__ import annotations

from tunesmith.errors import shortened
from tunesmith.learn.data.sources import SourceRow

MEDIA = (
    "video", "videos", "audio", "audios", "pixel_values", "image_url", "image_path",
)  # fmt: skip
WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight")
UNREAD_MEDIA = (
    "is not read: text and 'images' are. Leave the line out, or drop the column to train its text"
)
UNREAD_OPTIONS = (
    "is not read by line: set data.chat_template_kwargs for all lines, and drop the column"
)
UNREAD_WEIGHT = "is not read: every line counts alike. Give sources weights, or drop the column"
BAD_ANSWER = "calls the answer bad, and sft would learn it: use tunesmith kto, or drop the line"


def check_unread(row: SourceRow, goal: str, kind: str) -> None:
    """Raise BadLine for a column that changes what the line means and is not read.

    Args:
        goal, kind: the run's goal, and the kind of the row's format.
    """
    problems: dict[str, str] = dict.fromkeys(MEDIA, UNREAD_MEDIA)
    problems["chat_template_kwargs"] = UNREAD_OPTIONS
    if kind in ("text", "tagged"):
        problems["tools"] = "needs a conversation: text has no place for tools. Drop the column"
    if goal != "rl":
        weights = [name for name in WEIGHTS if _is_weight(row.scalar(name))]
        problems |= dict.fromkeys(weights, UNREAD_WEIGHT)
    if goal == "sft" and row.scalar("label") is False:
        problems["label"] = BAD_ANSWER
    for name, problem in problems.items():
        value = row.columns.get(name)
        if value not in (None, "", [], {}):
            raise row.bad(f"the column '{name}' ({shortened(repr(value), 40)}) {problem}")


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 1
