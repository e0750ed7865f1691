"""The settings and launches found in another framework's script or configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tunesmith.guide.migrate.programs import ForeignProgram

UNKNOWN = re.compile(r"\$\{[^{}]*\}|\$\([^()]*\)")
"""The placeholder of a shell variable or a command whose value is unknown."""


def is_text(value: str) -> bool:
    """Whether a text can be written to a file; half of a character, as in ``\\ud800``, cannot."""
    return not re.search("[\ud800-\udfff]", value)


def count_of(value: object) -> int:
    """The value, if it is a positive whole number; else 0."""
    return value if isinstance(value, int) and value is not True and value > 0 else 0


@dataclass(frozen=True, slots=True)
class Given:
    """One setting: ``name`` as written in the source, without dashes; ``text`` as a person would
    write it."""

    name: str
    value: Any
    line: int
    framework: str
    text: str = ""
    why: str = ""
    """Why the value is unknown, if more is known than that the source computes it."""

    @property
    def unknown(self) -> str:
        """The unknown variables and expressions in the value; empty if all of it is known."""
        text = self.value if isinstance(self.value, str) else ""
        return ", ".join(dict.fromkeys(UNKNOWN.findall(text)))

    @property
    def count(self) -> int:
        """The value, if it is a positive whole number; else 0."""
        return count_of(self.value)


@dataclass(frozen=True, slots=True)
class ForeignLaunch:
    """A program that was started, or configured, with all its settings.

    ``name`` is the program's in the source. ``devices`` is the number of processes or GPUs, if
    known.
    """

    name: str
    program: ForeignProgram
    settings: tuple[Given, ...] = ()
    devices: int | None = None
    notes: tuple[str, ...] = ()
