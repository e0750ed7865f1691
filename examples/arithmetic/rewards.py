"""Rewards: one number per completion, between 0 and 1."""

import re
from typing import Any

STEP = re.compile(r"(\d[\d+]*)=(\d+)")


def working_holds(completions: list[str], **columns: Any) -> list[float]:
    """The share of the sums written down on the way that are right; 0 where there are none."""
    return [_share_right(STEP.findall(completion)) for completion in completions]


def _share_right(steps: list[tuple[str, str]]) -> float:
    right = [sum(int(n) for n in terms.split("+") if n) == int(total) for terms, total in steps]
    return sum(right) / len(right) if right else 0.0
