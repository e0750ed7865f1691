"""What is found in a script or a configuration of another framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = re.compile(r"\$\{[^{}]*\}|\$\([^()]*\)")
"""What is left of a shell variable or a command whose value is not known."""


@dataclass(frozen=True, slots=True)
class Given:
    """One setting: ``name`` as it is written there, without dashes; ``text`` as a person would write it."""

    name: str
    value: Any
    line: int
    framework: str
    text: str = ""

    @property
    def unknown(self) -> str:
        """The variables and expressions in the value that are not known; empty if all of it is known."""
        return ", ".join(dict.fromkeys(UNKNOWN.findall(self.value))) if isinstance(self.value, str) else ""


@dataclass(frozen=True, slots=True)
class Launch:
    """A program that was started, or configured, with all its settings.

    ``command`` is ours, ``program`` what it is there. ``defaults`` are the program's own, where they decide what is
    learned. ``devices`` is the number of processes or GPUs, if it is known.
    """

    program: str
    command: str
    framework: str
    settings: tuple[Given, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    devices: int | None = None
    notes: tuple[str, ...] = ()
