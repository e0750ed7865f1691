"""A configuration to which derived values are being added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RunConfig

C = TypeVar("C", bound=RunConfig)


class Filling:
    """Collects derived values; ``config`` is the configuration with all values so far."""

    def __init__(self, config: RunConfig) -> None:
        self.config: Any = config
        self.derived: list[Derived] = []

    def get(self, key: str) -> Any:
        """The value of a dotted key, or None if it has been neither set nor derived."""
        section, _, name = key.rpartition(".")
        return getattr(attrgetter(section)(self.config) if section else self.config, name, None)

    def fill(self, key: str, value: Any, reason: str) -> None:
        """Set a key that was omitted."""
        if self.get(key) is None:
            self.set(key, value, reason)

    def take(self, reasons: Iterable[Derived]) -> None:
        """Set what was derived elsewhere."""
        for entry in reasons:
            self.set(entry.key, entry.value, entry.reason)

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set a key, replacing any value, and record why."""
        self.config = with_values(self.config, {key: value})
        self.derived.append(Derived(key, value, reason))

    def replace(self, key: str, value: Any, reason: str) -> None:
        """Set a key that was derived, in place of that entry, or set."""
        self.derived = [entry for entry in self.derived if entry.key != key]
        self.set(key, value, reason)

    def assume(self, key: str, value: Any) -> None:
        """Give a key a value that does not count as given: ``train.epochs`` next to the steps that
        it determines."""
        section, _, name = key.rpartition(".")
        inner: BaseModel = attrgetter(section)(self.config).model_copy(update={name: value})
        inner.model_fields_set.discard(name)
        self.config = with_values(self.config, {section: inner})

    def clear(self, key: str) -> None:
        """Clear a key that another one now determines, such as a ratio once the steps are known."""
        self.config = with_values(self.config, {key: None})


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """A copy of ``config`` with the values of dotted keys replaced."""
    for key, value in values.items():
        *sections, name = key.split(".")
        inner: BaseModel = attrgetter(".".join(sections))(config) if sections else config
        inner = inner.model_copy(update={name: value})
        config = with_values(config, {".".join(sections): inner}) if sections else cast(C, inner)
    return config
