"""The settings of one launch by meaning, so that a conversion can read other settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunesmith.config.commands import KINDS, all_keys
from tunesmith.guide.migrate.given import ForeignLaunch, Given, count_of
from tunesmith.guide.migrate.programs import MARKS
from tunesmith.guide.names.foreign import Meaning, meanings_of, spelled

Kind = Literal[
    "mapped", "derived", "off", "by hand", "computed", "absent", "changes", "unknown", "replaced"
]
"""The fate of a setting, in this order: it has a line; Tunesmith derives its purpose; it enabled
nothing; a person must decide; its value is known only when the source runs; it has no counterpart,
without or with an effect on learning; its name is unknown; a later line replaces it."""

ROLES = re.compile(r"(?:actor_rollout_ref\.)?(critic|ref|reward_model(?=\.(?:rollout|model)\.))\.")
"""Prefix of the settings of models other than the policy."""


def known_as(name: str, framework: str) -> tuple[str, list[Meaning]]:
    """``meanings_of`` in a framework and in those whose names it understands."""
    return meanings_of(name, tuple(MARKS["families"].get(framework, [framework])))


@dataclass(frozen=True, slots=True)
class Value:
    """The conversion of a setting: ``value`` of ``key``, and how it was computed, if it was."""

    key: str
    value: Any
    how: str = ""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a setting that has no line in the run file, and why; ``keys`` are the
    settings that it would set."""

    kind: Kind
    why: str
    keys: tuple[str, ...] = ()


Result = Value | Sequence[Value] | Fate
"""The result of a conversion."""


def by_hand(why: str) -> Fate:
    """A person must decide."""
    return Fate("by hand", why)


def without(why: str) -> Fate:
    """A setting that enables nothing in the source."""
    return Fate("off", why)


OFF = without("it is off there")


def is_off(value: object) -> bool:
    """Whether a value enables nothing: none, false, zero, minus one, an empty text or list."""
    return value in (None, False, 0, -1, "", "none", "None", "no", "auto", "default", [], {})


class NotKnownError(LookupError):
    """A conversion needs a setting whose value is computed when the source runs."""


class There:
    """The last value of each setting of a launch, by the known name that its path ends with.

    Other settings have the program's defaults.
    """

    def __init__(self, launch: ForeignLaunch) -> None:
        self.launch = launch
        self.command = launch.program.command
        self.framework = launch.program.framework
        self.rl = self.command in ("rl", "distill")
        self.keys = all_keys(KINDS[self.command])
        """The keys of the run file."""
        self._given: dict[str, Given] = {}
        for given in launch.settings:
            short = known_as(given.name, given.framework)[0] or spelled(given.name)
            role = ROLES.match(given.name)  # belongs to another model, not to the policy
            self._given[spelled(given.name)] = given
            if not role or role[1] in short:
                self._given[short] = given
        self._defaults = {spelled(name): value for name, value in launch.program.defaults.items()}
        for name, value in launch.program.defaults.items():
            self._defaults.setdefault(known_as(name, self.framework)[0], value)

    def get(self, *names: str, default: object = None) -> Any:
        """The value of the first of these names that is given; else the program's default; else
        ``default``.

        Raises:
            NotKnownError: the given value is unknown.
        """
        for given in (self._given[name] for name in names if name in self._given):
            if given.unknown:
                depends = f"it depends on {given.text}"
                raise NotKnownError(f"{depends}, which is computed when the source runs")
            if given.value is not None:
                return given.value
        return next((self._defaults[n] for n in names if n in self._defaults), default)

    def number(self, *names: str, default: int = 1) -> int:
        """Like ``get``, for a positive integer; ``default`` for other values."""
        return count_of(self.get(*names, default=default)) or default

    def meanings(self, given: Given) -> list[Meaning]:
        """The meanings of a name for this command: those with a key in its run file, else those
        with a reason."""
        known = known_as(given.name, given.framework)[1] or meanings_of(given.name)[1]
        known = [m for m in known if not m.commands or self.command in m.commands.split()]
        here = [m for m in known if any(key in self.keys for key in m.keys)]
        return here or [m for m in known if m.why] or known

    def given(self, *names: str) -> bool:
        return any(name in self._given for name in names)

    def defaults(self) -> Iterator[Given]:
        """The program's defaults that no given setting overrides."""
        for name, value in self.launch.program.defaults.items():
            if not self.given(spelled(name), known_as(name, self.framework)[0]):
                yield Given(name, value, 0, self.framework, f"{name}={value}")
