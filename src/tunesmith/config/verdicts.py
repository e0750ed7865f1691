"""What a changed setting, or changed content of a file, does to a run that is continued:
``verdicts.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunesmith.records.toml import table_beside


@dataclass(frozen=True, slots=True)
class Verdict:
    """On the settings ``keys``; see ``verdicts.toml``."""

    kind: Literal["record", "speed", "content", "effect", "refused"]
    keys: str
    effect: str = ""


@dataclass(frozen=True, slots=True)
class ContentVerdict:
    """On what a run reads from the files of a setting; see ``verdicts.toml``."""

    key: str
    text: str
    refused: bool = False


_TABLES = table_beside(__file__, "verdicts.toml")
SETTINGS = tuple(Verdict(**table) for table in _TABLES["setting"])
_BY_KEY = {key: verdict for verdict in SETTINGS for key in verdict.keys.split()}
CONTENTS: Mapping[str, ContentVerdict] = {
    name: ContentVerdict(**table) for name, table in _TABLES["content"].items()
}
"""By the names that ``contents_of`` gives to what a run reads from files."""


def verdict_of(key: str) -> Verdict:
    """The verdict on a setting, or on the innermost table around it."""
    names = [key, *(f"{key[:end]}." for end in range(len(key) - 1, 0, -1) if key[end] == ".")]
    return _BY_KEY[next(name for name in names if name in _BY_KEY)]
