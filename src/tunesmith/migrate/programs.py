"""The programs of other frameworks, and their counterparts here: ``programs.toml``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ForeignProgram:
    """``command`` is Tunesmith's, empty for a program that does not train or sample, which ``why`` then describes.

    ``extra`` holds our settings that the program itself implies, ``missing`` its features that are missing here.
    """

    match: str
    framework: str
    command: str
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    why: str = ""
    missing: str = ""


@cache
def programs() -> tuple[ForeignProgram, ...]:
    text = Path(__file__).with_name("programs.toml").read_text(encoding="utf-8")
    return tuple(ForeignProgram(**entry) for entry in tomllib.loads(text)["program"])


def find_program(name: str) -> ForeignProgram | None:
    """The program for a module (``verl.trainer.main_ppo``), a script's path, a class, or ``trl:sft``."""
    dotted = name.removesuffix(".py").lstrip("./").replace("/", ".")
    spellings = {name, name.rpartition("/")[2], dotted}
    for program in programs():
        if any(fnmatchcase(spelling, pattern) for pattern in program.match.split() for spelling in spellings):
            return program
    return None


def parsed(text: str) -> Any:
    """The value that a command line or a YAML scalar means: ``1e-6``, ``True``, ``null``, ``[a,b]``, ``{"a": 1}``."""
    text = text.strip()
    if re.fullmatch(r"[-+]?\d+", text) and len(text) < 20:
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return float(text)
    if (word := text.lower()) in ("true", "false"):
        return word == "true"
    if word in ("null", "none", "~", ""):
        return None
    if text[0] in "[{(" and not re.search(r"\$[{(]", text):
        return _listed(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _listed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text[0] in "[(" and text[-1] in "])":
        items = re.findall(r"'[^']*'|\"[^\"]*\"|[^,\s][^,]*", text[1:-1])
        return [parsed(item) for item in items]
    return text
