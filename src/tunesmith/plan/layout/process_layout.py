"""A layout: how many processes a run has, and which of them share GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import BaseModel

from tunesmith.config.section import known
from tunesmith.config.system import PlacementSection, SystemSection
from tunesmith.plan.plan import C, Plan

KEYS = {
    "trainer_ranks": "system.trainer_ranks",
    "zero_stage": "system.zero_stage",
    "sequence": "system.sequence_parallel.size",
    "engines": "system.engines",
    "tensor": "system.vllm.tensor_parallel_size",
    "engine_process": "system.engine_process",
    "hybrid": "system.hybrid",
    "placement": "system.placement",
}
"""The setting of each field."""


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    trainer_ranks: int = 1
    zero_stage: int = 0
    sequence: int = 1
    engines: int = 1
    tensor: int = 1
    engine_process: bool | None = None
    """None: as it was said; so are the following."""
    hybrid: bool | None = None
    placement: PlacementSection | None = None
    """May be given in part."""

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted key; those that are as said are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {KEYS[name]: value for name, value in values.items() if value is not None}

    def of(self, plan: Plan[C]) -> Plan[C]:
        """The plan with this layout."""
        devices = plan.devices
        process = devices.engine_process if self.engine_process is None else self.engine_process
        return replace(
            plan,
            devices=replace(
                devices,
                trainer_ranks=self.trainer_ranks,
                zero_stage=self.zero_stage,
                sequence=self.sequence,
                engines=self.engines,
                tensor=self.tensor,
                engine_process=process,
                hybrid=devices.hybrid if self.hybrid is None else self.hybrid,
                placement=self.placement or devices.placement,
            ),
        )


def said_shape(system: SystemSection) -> Mapping[str, Any]:
    """What the run file, an override or a launcher set of a layout, by field; None: nothing."""
    written = system.model_fields_set
    return {
        "trainer_ranks": known(system, "trainer_ranks"),
        "zero_stage": known(system, "zero_stage"),
        "sequence": system.sequence_parallel.size if "sequence_parallel" in written else None,
        "engines": known(system, "engines"),
        "tensor": known(system.vllm, "tensor_parallel_size"),
        "engine_process": system.engine_process if "engine_process" in written else None,
        "hybrid": known(system, "hybrid"),
    }


def plain(value: Any) -> Any:
    """A layout's value as plain JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    return value
