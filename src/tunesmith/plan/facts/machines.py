"""Machines given by name, present or not: ``8xH100-80GB``, ``2x8xA100-80GB``,
``8xH100-80GB+4xL40S-48GB``, ``this``; see ``machines.toml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from tunesmith.errors import ConfigError, nearest, shortened
from tunesmith.plan.facts.hardware import Gpu, Hardware, read_hardware
from tunesmith.records.toml import table_beside

THIS = "this"
MOST_GPUS = 128
MOST_NODES = 4096
_DRIVER = 512 * 2**20
"""GPU memory that the driver reserves before anything uses it."""
_UNITS = {"memory": 2**20, "flops": 1e12, "bandwidth": 1e9, "link": 1e9, "host_memory": 2**30}
"""The units of ``machines.toml``."""
_SPEC = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A GPU in the table: bytes, operations and bytes per second, and its machine's resources per
    GPU."""

    name: str
    memory: int
    capability: tuple[int, int]
    flops: float
    """Operations per second in bfloat16, or in float16 if it lacks bfloat16."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to other GPUs in its machine, in one direction."""
    cores: int
    host_memory: int
    host: str
    source: str
    ray: str = ""
    """Ray's name of such a GPU, if it is not the beginning of ``name``."""

    @property
    def gpu(self) -> Gpu:
        return Gpu(self.name, self.memory, self.memory - _DRIVER, self.capability)


@cache
def gpu_kinds() -> Mapping[str, GpuKind]:
    """The table of GPUs, by name."""
    kinds: dict[str, GpuKind] = {}
    for name, row in table_beside(__file__, "machines.toml").items():
        in_units = {key: row[key] * unit for key, unit in _UNITS.items()}
        kinds[name] = GpuKind(name, **row | in_units | {"capability": tuple(row["capability"])})
    return kinds


def machines(spec: str) -> list[Hardware]:
    """Machines with different GPUs, whose specifications are joined by ``+``.

    Example:
        >>> [each.in_words for each in machines("2x8xH100-80GB + 4xL40S")]
        ['2x8xH100-80GB', '4xL40S-48GB']

    Raises:
        ConfigError: see ``machine``; or two of them have the same GPU.
    """
    found = [machine(part) for part in spec.split("+")]
    if len(found) == 1:
        return found
    names = [_ray_name(each.gpus[0]) if each.named else None for each in found]
    if None in names or len({*names}) < len(names):
        raise ConfigError(
            f"machine '{shortened(spec)}': the machines that + joins have different GPUs, as in "
            "8xH100-80GB+4xL40S-48GB; write machines that are alike as 2x8xH100-80GB"
        )
    return [replace(each, accelerator=name) for each, name in zip(found, names, strict=True)]


def _ray_name(gpu: Gpu) -> str:
    return gpu_kinds()[gpu.name].ray or gpu.name.partition("-")[0]


def machine(spec: str) -> Hardware:
    """The machine for a specification: ``[machines x] [GPUs in each x] GPU``, or ``this`` for the
    current one.

    A GPU's memory may be omitted if it comes in one size: ``8xH200``. Cores and host memory are
    those of a usual machine with such GPUs, scaled to their number.

    Example:
        >>> [len(machine(spec).gpus) for spec in ("H100-80GB", "8xh200", "2x8xA100-80GB")]
        [1, 8, 8]
        >>> machine("2x8xA100-80GB").nodes
        2

    Raises:
        ConfigError: no such GPU, or a number that no machine has.
    """
    if spec.strip().lower() == THIS:
        return read_hardware()
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ConfigError(
            f"machine '{spec}' is empty; write it as 8xH100-80GB, 2x8xA100-80GB or {THIS}"
        )
    kind = _kind(match[3])
    nodes = int((match[1] or "1")[:9])
    count = int((match[2] or "1")[:9])
    if not (0 < count <= MOST_GPUS and 0 < nodes <= MOST_NODES):
        raise ConfigError(
            f"machine '{shortened(spec)}': {nodes} machines with {count} GPUs each; there may be 1 "
            f"to {MOST_NODES} machines, with 1 to {MOST_GPUS} GPUs"
        )
    memory = kind.host_memory * count
    cpu = f"CPU of {kind.host}"
    return Hardware(
        cpu,
        kind.cores * count,
        memory,
        memory,
        bf16=False,
        gpus=(kind.gpu,) * count,
        compiler="c++",
        nodes=nodes,
        named=True,
    )


@cache
def kind_of(gpu: Gpu) -> GpuKind | None:
    """The table's entry for a GPU listed by ``nvidia-smi``; None if there is none."""
    words = re.sub(r"[^a-z0-9]", "", gpu.name.lower())
    fitting = [
        kind
        for kind in gpu_kinds().values()
        if kind.name == gpu.name
        or (
            _family(kind.name) in words and abs(kind.memory - gpu.memory_total) < 0.05 * kind.memory
        )
    ]
    return max(fitting, key=lambda kind: len(_family(kind.name)), default=None)


def _family(name: str) -> str:
    """The letters and digits of a name without its memory size: ``H100-PCIe-80GB`` →
    ``h100pcie``."""
    return name.lower().rpartition("-")[0].replace("-", "")


def _kind(name: str) -> GpuKind:
    kinds = gpu_kinds()
    wanted = name.strip().lower()
    names = {kind.name.lower(): kind for kind in kinds.values()}
    fitting = [kind for name, kind in names.items() if wanted in (name, name.rpartition("-")[0])]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(
            f"GPU '{name}' comes with different memories: "
            f"{', '.join(kind.name for kind in fitting)}"
        )
    beginning = [k for k in kinds if wanted.partition("-")[0] == k.lower().partition("-")[0]]
    hint = f" There is {', '.join(beginning)}." if beginning else nearest(name, kinds)
    raise ConfigError(
        f"unknown GPU '{shortened(name)}'.{hint} Write it as 8xH100-80GB, 2x8xA100-80GB or {THIS}"
    )
