"""The programs of other frameworks, and their counterparts here: ``programs.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from tunesmith.records.toml import table_beside

MARKS = table_beside(__file__, "marks.toml")


@dataclass(frozen=True, slots=True)
class ForeignProgram:
    """``command`` is Tunesmith's, empty for a program that does not train or sample, which ``why``
    then describes.

    ``defaults`` are the program's defaults that affect learning, ``extra`` our settings that the
    program implies, ``missing`` its features that are missing here.
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
    table = table_beside(__file__, "programs.toml")
    return tuple(ForeignProgram(**entry) for entry in table["program"])


def find_program(name: str) -> ForeignProgram | None:
    """The program for a module (``verl.trainer.main_ppo``), a script's path, a class, or
    ``trl:sft``."""
    dotted = name.removesuffix(".py").lstrip("./").replace("/", ".")
    spellings = (name, name.rpartition("/")[2], dotted)
    for program in programs():
        for pattern in program.match.split():
            if any(fnmatchcase(spelling, pattern) for spelling in spellings):
                return program
    return None
