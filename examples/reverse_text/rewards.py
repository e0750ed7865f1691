"""A dense reward: every letter in its place counts, so the model need not be all right to learn."""

from typing import Any


def letters_in_place(completions: list[str], word: list[str], **columns: Any) -> list[float]:
    """The share of letters that stand where they should; letters too many or too few count as
    wrong."""
    return [
        _share(completion, original[::-1])
        for completion, original in zip(completions, word, strict=True)
    ]


def _share(said: str, wanted: str) -> float:
    same = sum(a == b for a, b in zip(said, wanted, strict=False))
    return same / max(len(said), len(wanted))
