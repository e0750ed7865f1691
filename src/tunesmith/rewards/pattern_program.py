"""Regular expressions on what a model wrote. Runs in a worker process, because one can backtrack for ever."""

from __future__ import annotations

import re


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches."""
    return re.fullmatch(pattern, text) is not None


def extract(pattern: str, text: str) -> str | None:
    """The first group that took part in the last match; None without a match."""
    found = None
    for match in re.finditer(pattern, text):
        found = next((group for group in match.groups() if group is not None), found)
    return found
