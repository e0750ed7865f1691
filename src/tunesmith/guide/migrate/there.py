"""The settings of one launch by meaning, so that a conversion can read other settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.config.commands import KINDS, all_keys
from tunesmith.guide.migrate.given import ForeignLaunch, Given, count_of
from tunesmith.guide.names.foreign import Meaning, meanings_of, spelled

_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "trl": ("trl", "transformers"),
    "transformers": ("transformers", "trl"),
    "stateset-agents": ("stateset-agents", "transformers", "trl"),
    "accelerate": ("accelerate", "deepspeed", "transformers"),
}
"""Frameworks whose names a program also understands."""

ROLES = re.compile(r"(?:actor_rollout_ref\.)?(critic|ref|reward_model(?=\.(?:rollout|model)\.))\.")
"""Prefix of the settings of models other than the policy."""


def family(framework: str) -> tuple[str, ...]:
    return _FAMILIES.get(framework, (framework,))


@dataclass(frozen=True, slots=True)
class Value:
    """The conversion of a setting: ``value`` of ``key``, and how it was computed, if it was."""

    key: str
    value: Any
    how: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A setting that has no line in the run file, and why.

    ``off``: it enables nothing in the source either; otherwise a person must decide.
    """

    why: str
    off: bool = False


Result = Value | Sequence[Value] | Dropped
"""The result of a conversion."""


def without(why: str) -> Dropped:
    """A setting that enables nothing in the source."""
    return Dropped(why, off=True)


OFF = without("it is off there")


def is_off(value: Any) -> bool:
    """Whether a value enables nothing: none, false, zero, minus one, an empty text or list."""
    return (
        value in (None, False, 0, -1, "", "none", "None", "no", "auto", "default")
        or value == []
        or value == {}
    )


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
        self._given: dict[str, Given] = {}
        for given in launch.settings:
            short = meanings_of(given.name, family(given.framework))[0] or spelled(given.name)
            role = ROLES.match(given.name)  # belongs to another model, not to the policy
            self._given[spelled(given.name)] = given
            if not role or role[1] in short:
                self._given[short] = given
        self._defaults = {spelled(name): value for name, value in launch.program.defaults.items()}
        for name, value in launch.program.defaults.items():
            self._defaults.setdefault(meanings_of(name, family(self.framework))[0], value)

    @property
    def rl(self) -> bool:
        return self.command in ("rl", "distill")

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that is given; else the program's default; else
        ``default``.

        Raises:
            NotKnownError: the given value is unknown.
        """
        for name in names:
            if name in self._given and self._given[name].value is not None:
                given = self._given[name]
                if given.unknown:
                    depends = f"it depends on {given.text}"
                    raise NotKnownError(f"{depends}, which is computed when the source runs")
                return given.value
        return next((self._defaults[n] for n in names if n in self._defaults), default)

    def number(self, *names: str, default: int = 1) -> int:
        """Like ``get``, for a positive integer; ``default`` for other values."""
        return count_of(self.get(*names, default=default)) or default

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the run file."""
        return all_keys(KINDS[self.command])

    def meanings(self, given: Given) -> list[Meaning]:
        """The meanings of a name for this command: those with a key in its run file, else those
        with a reason."""
        known = meanings_of(given.name, family(given.framework))[1] or meanings_of(given.name)[1]
        known = [m for m in known if not m.commands or self.command in m.commands.split()]
        here = [m for m in known if any(key in self.keys for key in m.keys)]
        return here or [m for m in known if m.why] or known

    def given(self, *names: str) -> bool:
        return any(name in self._given for name in names)

    def defaults(self) -> Iterator[Given]:
        """The program's defaults that no given setting overrides."""
        for name, value in self.launch.program.defaults.items():
            known = meanings_of(name, family(self.framework))[0]
            if spelled(name) not in self._given and known not in self._given:
                yield Given(name, value, 0, self.framework, f"{name}={value}")
