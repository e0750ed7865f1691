"""What an adapter brings, and finding it by the name of its package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol

from tunesmith.config.reading.packages import PackageName

Foreign = Any
"""An object of a package, which is typed in part."""
Options = Mapping[str, object]
TaskRow = dict[str, object]
"""The columns of a task, as JSON values."""


class Adapter(Protocol):
    """A module of this directory."""

    def rows(self, name: str, split: str, options: Options) -> Iterator[TaskRow]:
        """The tasks of a split, in an order that depends on the options alone.

        Raises:
            ConfigError: there is no such name, split or option.
        """
        ...

    def environment(self, name: str) -> Foreign:
        """The class or agent that plays its tasks, where the package has environments.

        Raises:
            ConfigError: there is no such name.
        """
        ...


def adapter(named: PackageName) -> Adapter:
    """The adapter of a package; a ConfigError if the package is not installed."""
    named.require()
    module: Foreign = import_module(f"tunesmith.learn.packages.{named.package}")
    return module
