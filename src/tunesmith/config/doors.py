"""Doors: how the trainer finds what it does not need, and therefore does not import.

A door is declared by the one who looks for what is behind it, with the places of what this package
has there; ``rooms`` imports them on first use::

    ANSWERS = Door[KeyAnswers]("answers", "tunesmith.guide.names.answers:ForeignAnswers")
    kinds: tuple[KeyAnswers, ...] = ANSWERS.rooms

A place is left out if its module is not there, or a room of this package that it imports: whoever
declares a door works without it. Other packages add theirs by entry points of the group
``tunesmith.<name of the door>``::

    [project.entry-points."tunesmith.answers"]
    mine = "my_package.answers:MyAnswers"
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from tunesmith.errors import ConfigError, boundary

T = TypeVar("T")


class Door(Generic[T]):
    def __init__(self, name: str, *places: str) -> None:
        """Args:
        places: ``module:name`` each, of this package.
        """
        self.name = name
        self.places = places

    @cached_property
    def rooms(self) -> tuple[T, ...]:
        """What is registered: first this package's, in order.

        Raises:
            ConfigError: an entry point of another package cannot be loaded.
        """
        own = [_load_if_there(place) for place in self.places]
        rooms = [room for room in own if room is not None]
        for point in entry_points(group=f"tunesmith.{self.name}"):
            place = f"the entry point '{point.name}' of {point.group} ({point.value})"
            with boundary(ConfigError, f"{place} cannot be loaded", Exception):
                rooms.append(point.load())
        return tuple(rooms)


def load(place: str) -> Any:
    """The object at ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _load_if_there(place: str) -> Any:
    """The object at a place; None if its module, or a room that it imports, is not there."""
    try:
        return load(place)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tunesmith."):
            raise  # it lacks a library
        return None
