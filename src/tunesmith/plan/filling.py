"""A configuration while it fills up."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RunConfig

C = TypeVar("C", bound=RunConfig)


class Filling(Generic[C]):
    """Collects derived values; ``config`` is the configuration with those so far."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.derived: list[Derived] = []

    def get(self, key: str) -> Any:
        """The value of a dotted key, or None if it has been neither set nor derived."""
        section, _, name = key.rpartition(".")
        return getattr(attrgetter(section)(self.config) if section else self.config, name, None)

    def fill(self, key: str, value: Any, reason: str) -> None:
        """Set a key that was left out."""
        if self.get(key) is None:
            self.set(key, value, reason)

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set a key, whatever it was, and remember why."""
        self._put(key, value)
        self.derived.append(Derived(key, value, reason))

    def clear(self, key: str) -> None:
        """Forget a key that another one now says exactly, such as epochs once the steps are counted."""
        self._put(key, None)

    def _put(self, key: str, value: Any) -> None:
        section, _, name = key.rpartition(".")
        while section:
            inner: BaseModel = self.get(section)
            value = inner.model_copy(update={name: value})
            section, _, name = section.rpartition(".")
        self.config = self.config.model_copy(update={name: value})
