"""A layout: how many processes a run has, and which of them share GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tunesmith.config.system import PlacementSection, SystemSection
from tunesmith.plan.derive.weights import with_plane
from tunesmith.plan.plan import OF_DEVICES, C, Plan


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
        """The plan with this layout, and with the way from GPU to GPU that new weights have in
        it."""
        devices = plan.devices
        process = devices.engine_process if self.engine_process is None else self.engine_process
        return with_plane(
            plan.with_devices(
                trainer_ranks=self.trainer_ranks,
                zero_stage=self.zero_stage,
                sequence=self.sequence,
                engines=self.engines,
                tensor=self.tensor,
                engine_process=process,
                hybrid=devices.hybrid if self.hybrid is None else self.hybrid,
                placement=self.placement or devices.placement,
            )
        )


KEYS = {each.name: f"system.{OF_DEVICES[each.name]}" for each in fields(ProcessLayout)}
"""The setting of each field."""


def said_shape(system: SystemSection) -> Mapping[str, Any]:
    """What the run file, an override or a launcher set of a layout, by field; None: nothing."""
    written = system.model_fields_set
    return {
        "trainer_ranks": system.trainer_ranks,
        "zero_stage": system.zero_stage,
        "sequence": system.sequence_parallel.size if "sequence_parallel" in written else None,
        "engines": system.engines,
        "tensor": system.vllm.tensor_parallel_size,
        "engine_process": system.engine_process if "engine_process" in written else None,
        "hybrid": system.hybrid,
    }
