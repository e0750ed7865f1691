"""A launch by ``torchrun`` or ``accelerate launch``, as its environment describes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import gettempdir

from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hardware import read_gpus
from tunesmith.run.processes.machines import own_address, own_view

MEETING = 60.0
"""Seconds that the processes of one launch may take to meet."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher's settings for this process."""

    rank: int
    world: int
    local_world: int
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """None if this process is the only one, or was not started by a launcher."""
        names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        said = {name: environment[name] for name in names if name in environment}
        wrong = [f"{name}={value}" for name, value in said.items() if not value.isdecimal()]
        if wrong:
            raise ConfigError(
                f"the environment has {wrong[0]}, and a launcher such as torchrun sets a number "
                "there"
            )
        world = int(said.get("WORLD_SIZE", "1"))
        if world <= 1 or "RANK" not in said:
            return None
        here = int(said.get("LOCAL_WORLD_SIZE", world))
        rank = int(said["RANK"])
        return cls(rank, world, here, int(said.get("LOCAL_RANK", rank)))

    @property
    def several_machines(self) -> bool:
        return self.local_world < self.world

    @property
    def machines(self) -> int:
        return ceil(self.world / self.local_world)

    @property
    def directory(self) -> Path:
        """Where the processes meet."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Path(gettempdir()) / f"tunesmith-{os.getuid()}-{os.getppid()}-{attempt}"


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What a process is started with that a rank starts for rank 0."""

    gpus: tuple[int, ...] | None = None
    """The numbers of the GPUs that it sees, of those of the machine; None: those of the rank."""
    python: Path | None = None
    """The interpreter of another environment that has Tunesmith."""


ALIKE = ChildStart()


def launched_address() -> str:
    """This machine's address, as the run's other processes reach it without Ray."""
    launch = Launch.of()
    return own_address() if launch and launch.several_machines else "127.0.0.1"


def machine_view(launch: Launch) -> dict[str, str]:
    """``own_view``, and what else must be equal on machines that have engines."""
    sizes = [8 * round(gpu.memory_total / 8 / 2**30) for gpu in read_gpus()]  # drivers differ
    kinds = " and ".join(f"{sizes.count(size)} of {size} GiB" for size in dict.fromkeys(sizes))
    return own_view() | {"GPUs": kinds, "processes on each machine": str(launch.local_world)}
