"""Regular expressions on a model's text. Runs in a worker process, because a pattern can backtrack
without end."""

from __future__ import annotations

import re


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches."""
    return re.fullmatch(pattern, text) is not None


def extract(pattern: str, text: str) -> str | None:
    """The first group that took part in the last match; None without a match."""
    group = None
    for match in re.finditer(pattern, text):
        group = next((one for one in match.groups() if one is not None), group)
    return group
