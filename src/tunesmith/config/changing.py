"""Setting values by key, for what is about keys: profiles, remedies, tuning, migration."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from tunesmith.config.schema import RunConfig

C = TypeVar("C", bound=RunConfig)


def with_values(config: C, values: Mapping[str, Any], *, given: bool = True) -> C:
    """A copy of ``config`` with the values of dotted keys replaced.

    Args:
        given: whether the values count as given.
    """
    for key, value in values.items():
        *sections, name = key.split(".")
        inner: BaseModel = attrgetter(".".join(sections))(config) if sections else config
        inner = inner.model_copy(update={name: value})
        if not given:
            inner.model_fields_set.discard(name)
        config = with_values(config, {".".join(sections): inner}) if sections else cast(C, inner)
    return config
