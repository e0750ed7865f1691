"""A reward with a tolerance: one number per completion, between 0 and 1."""

from typing import Any

FULL = 0.02
NONE = 0.1
"""Relative errors up to which the reward is 1, and from which it is 0."""


def close_enough(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 within 2 percent of the answer, falling to 0 at 10 percent; 0 for what is no number."""
    return [
        _closeness(completion, float(gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def _closeness(completion: str, gold: float) -> float:
    try:
        error = abs(float(completion) - gold) / gold
    except ValueError:
        return 0.0
    return min(1.0, max(0.0, (NONE - error) / (NONE - FULL)))
