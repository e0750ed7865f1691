"""Setting values by key, for what is about keys: profiles, remedies, tuning, migration."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TypeVar, cast

from pydantic import BaseModel

from tunesmith.config.schema import RunConfig

C = TypeVar("C", bound=RunConfig)


def with_values(config: C, values: Mapping[str, object]) -> C:
    """A copy of ``config`` with the values of dotted keys replaced, which count as given."""
    for key, value in values.items():
        *sections, name = key.split(".")
        inner: BaseModel = attrgetter(".".join(sections))(config) if sections else config
        inner = inner.model_copy(update={name: value})
        config = with_values(config, {".".join(sections): inner}) if sections else cast(C, inner)
    return config
