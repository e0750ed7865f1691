"""The base class of every table in a run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class _Derived:
    def __repr__(self) -> str:
        return "derived"


DERIVED = _Derived()


def derived() -> Any:
    """The default of a key that ``resolve`` fills in if the run file omits it.

    The field's type is that of the resolved value. Before ``resolve`` the key has no value, and
    reading it raises ``AttributeError``; use ``known`` to read keys that may not have a value yet.
    """
    return Field(default=DERIVED, validate_default=False)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Annotates text that has to be one of several names, to which other packages add theirs."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def check(name: str) -> str:
            if name not in self.names():
                raise PydanticCustomError("one_of", "unknown name")
            return name

        return core_schema.no_info_after_validator_function(check, handler(source))


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    def model_post_init(self, _context: object, /) -> None:
        for key in [key for key, value in self.__dict__.items() if value is DERIVED]:
            object.__delattr__(self, key)


def known(section: Section, key: str) -> Any:
    """The value of a key, or None if it has been neither set nor derived."""
    return getattr(section, key, None)
