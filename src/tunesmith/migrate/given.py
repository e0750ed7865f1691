"""The settings and launches found in another framework's script or configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = re.compile(r"\$\{[^{}]*\}|\$\([^()]*\)")
"""The placeholder of a shell variable or a command whose value is unknown."""


@dataclass(frozen=True, slots=True)
class Given:
    """One setting: ``name`` as written in the source, without dashes; ``text`` as a person would write it."""

    name: str
    value: Any
    line: int
    framework: str
    text: str = ""

    @property
    def unknown(self) -> str:
        """The unknown variables and expressions in the value; empty if all of it is known."""
        return ", ".join(dict.fromkeys(UNKNOWN.findall(self.value))) if isinstance(self.value, str) else ""


@dataclass(frozen=True, slots=True)
class ForeignLaunch:
    """A program that was started, or configured, with all its settings.

    ``command`` is Tunesmith's, ``program`` the other framework's. ``defaults`` are the program's defaults that affect
    learning. ``devices`` is the number of processes or GPUs, if known.
    """

    program: str
    command: str
    framework: str
    settings: tuple[Given, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    devices: int | None = None
    notes: tuple[str, ...] = ()
