"""The base class of every table in a run file, which holds what was said and is never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")


def _written(value: object) -> object:
    if value is None:
        raise PydanticCustomError("null", "a key that is open is left out")
    return value


_OPEN = BeforeValidator(_written)

Open = Annotated[T | None, Field(validate_default=False), _OPEN]
"""The type of a key that follows from others where it is left out. It is None then, and the plan
has its value; nobody writes None."""


def is_open(field: FieldInfo) -> bool:
    return _OPEN in field.metadata


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
