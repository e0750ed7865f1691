"""The settings of a layout, and which of them a run sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known

Settings = Mapping[str, Any]
"""Values by dotted key."""

RANKS = "system.trainer_ranks"
STAGE = "system.zero_stage"
ENGINES = "system.engines"
SEQUENCE = "system.sequence_parallel.size"
TENSOR = "system.vllm.tensor_parallel_size"
PROCESS = "system.engine_process"
TURNS = "system.hybrid"
PLACEMENT = "system.placement"
"""The key of a ``PlacementSection``, which may be given in part."""
ONE_PROCESS: Settings = {RANKS: 1, STAGE: 0, SEQUENCE: 1, ENGINES: 1, TENSOR: 1}
"""The layout of a run on one device."""


def given(config: RunConfig, key: str) -> Any:
    """The value of a setting that the run file, an override or a launcher set; else None."""
    system = config.system
    name = key.rpartition(".")[2]
    if key == PLACEMENT:
        return None
    if key == PROCESS:
        return system.engine_process if name in system.model_fields_set else None
    if key == SEQUENCE:
        return (
            system.sequence_parallel.size
            if "sequence_parallel" in system.model_fields_set
            else None
        )
    return known(system.vllm if key == TENSOR else system, name)


def plain(value: Any) -> Any:
    """A layout's value as plain JSON."""
    return (
        value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
    )
