"""``tunesmith check cluster``: the hardware of a launch's processes, and the speed of communication
between them."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.system import Role
from tunesmith.config.values import format_size
from tunesmith.errors import TrainerLostError
from tunesmith.learn.usercode.far import Far, gather
from tunesmith.plan.devices import visible_names
from tunesmith.plan.facts.hardware import nvidia_smi, read_hardware
from tunesmith.run.placement.host import PartHost, build
from tunesmith.run.placement.machines import written_probe
from tunesmith.run.processes.launch import launched_address
from tunesmith.run.processes.machines import PACKAGES, own_view
from tunesmith.run.processes.meeting import Meeting
from tunesmith.run.processes.torchrun import LaunchedProcesses
from tunesmith.run.specs.base import Seat

if TYPE_CHECKING:
    from tunesmith.run.processes.rank_group import RankGroup

SMALL = 8
LARGE = 32 << 20
"""Bytes of the all-reduces that measure latency and bandwidth."""
ROUNDS = 7
_ENVIRONMENT = ("NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The environment of one process."""

    host: str
    address: str
    device: str
    """The GPU's name and memory, or the CPU's name and cores."""
    driver: str
    """The GPU's driver version."""
    versions: dict[str, str]
    environment: dict[str, str]
    """The settings of NCCL, gloo and CUDA."""

    @property
    def versions_text(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


def own_place() -> ProcessPlace:
    machine = read_hardware()
    device = f"{machine.cpu}, {machine.cores} cores"
    if machine.gpus:
        device = f"{machine.gpus[0].name}, {format_size(machine.gpus[0].memory_total)}"
    view = own_view()
    return ProcessPlace(
        socket.gethostname(),
        launched_address(),
        device,
        driver_version() if machine.gpus else "",
        {name: view[name] for name in ("python", *PACKAGES) if name in view},
        {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)},
    )


def driver_version() -> str:
    """The version of the first GPU's driver; "unknown" if nvidia-smi does not say."""
    said = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return said.strip() or "unknown"


def sees(probe: Path, text: str) -> bool:
    return probe.is_file() and probe.read_text(encoding="utf-8") == text


@dataclass(frozen=True, slots=True)
class ProberSpec:
    """Makes what sums over the ranks, on the device of each."""

    shares: bool = False

    @property
    def device(self) -> str:
        return "cuda" if read_hardware().gpus else "cpu"

    def build(self, seat: Seat) -> Prober:
        assert seat.group is not None
        return Prober(seat.group, self.device)


@dataclass(frozen=True, slots=True)
class Prober:
    group: RankGroup
    device: str

    def seconds(self, num_bytes: int) -> float:
        """Seconds of an all-reduce over the ranks: the median of several, after one that opens
        connections."""
        import torch

        numbers = torch.ones(num_bytes // 4, device=self.device)
        durations = list[float]()
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            self.group.sum(numbers)
            if numbers.is_cuda:
                torch.cuda.synchronize()
            durations.append(time.perf_counter() - start)
        return statistics.median(durations[1:])


def meet(ranks: Sequence[Far]) -> None:
    """Let processes find each other, and make what sums over them.

    Raises:
        ConfigError, TrainerLostError: they do not come together.
    """
    gather(far.make(partial(PartHost, ProberSpec(), launched_address)) for far in ranks)
    build(ranks, len(ranks))


def seconds_of_sum(ranks: Sequence[Far], num_bytes: int) -> float:
    """Seconds of an all-reduce on the slowest rank."""
    return max(gather(far.submit("seconds", num_bytes) for far in ranks))


def bus_rate(world: int, seconds: float) -> float:
    """Bytes per second over each rank's connection in a large all-reduce (``nccl-tests``, "bus
    bandwidth")."""
    return 2 * (world - 1) / world * LARGE / seconds


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The findings about all ranks.

    Args:
        blind: ranks that cannot see the shared directory.
        seconds: durations of a small and a large all-reduce; None for a single process.
    """

    places: Sequence[ProcessPlace]
    shared: Path
    blind: Sequence[int] = ()
    seconds: tuple[float, float] | None = None

    @property
    def bandwidth(self) -> float | None:
        """``bus_rate`` of a large all-reduce, in bytes per second; None for a single process."""
        return None if self.seconds is None else bus_rate(len(self.places), self.seconds[1])

    def lines(self) -> list[str]:
        first = self.places[0]
        lines = [first.versions_text]
        for rank, place in enumerate(self.places):
            driver = f", driver {place.driver}" if place.driver else ""
            lines.append(f"rank {rank}: {place.host} ({place.address}), {place.device}{driver}")
        lines += [f"{name}={value}" for name, value in first.environment.items()]
        if self.seconds and self.bandwidth:
            lines.append(f"sum of {SMALL} bytes: {1e3 * self.seconds[0]:.3g} ms")
            lines.append(f"sum of {format_size(LARGE)}: {self.bandwidth / 1e9:.3g} GB/s")
            lines.append(f"shared directory: {self.shared}")
        return lines

    def problems(self, least: float | None = None) -> list[str]:
        """The problems found.

        Args:
            least: GB/s that the bandwidth has to reach.
        """
        compared = {
            "devices": [place.device for place in self.places],
            "GPU drivers": [place.driver for place in self.places],
            "versions": [place.versions_text for place in self.places],
        }
        names = {name for place in self.places for name in place.environment}
        for name in sorted(names - {"CUDA_VISIBLE_DEVICES"}):
            compared[name] = [place.environment.get(name, "(not set)") for place in self.places]
        problems: list[str] = []
        for what, values in compared.items():
            ranks: dict[str, list[str]] = {}
            for rank, value in enumerate(values):
                ranks.setdefault(value, []).append(str(rank))
            each = [f"{value} (rank {', '.join(of)})" for value, of in ranks.items()]
            problems += [f"{what} differ: {'; '.join(each)}"] if len(each) > 1 else []
        if self.blind:
            hosts = ", ".join(f"{rank} on {self.places[rank].host}" for rank in self.blind)
            unseen = f"rank {hosts} does not see what rank 0 writes there"
            problems.append(f"{self.shared} is not shared: {unseen}")
        if least is not None and self.bandwidth is not None and self.bandwidth < least * 1e9:
            speed = f"{self.bandwidth / 1e9:.3g} GB/s"
            problems.append(f"the ranks sum at {speed}, and --bandwidth asks for {least:g}")
        return problems


def examine(met: Meeting | None, shared: Path) -> ClusterReport:
    """Examine all ranks of a launch, or only this process.

    Raises:
        ConfigError, TrainerLostError: the ranks do not come together.
    """
    if met is None:
        return ClusterReport([own_place()], shared)
    world = met.launch.world
    own = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), len(read_hardware().gpus))
    seen: dict[Role, list[tuple[str]]] = {"actor": [(name,) for name in own]} if own else {}
    with LaunchedProcesses(met, seen) as processes:
        ranks = [processes.spawn("actor", TrainerLostError) for _ in range(world)]
        meet(ranks)
        places: list[ProcessPlace] = gather(far.submit("run", own_place) for far in ranks)
        with written_probe(shared) as (probe, text):
            seen_by = gather(far.submit("run", partial(sees, probe, text)) for far in ranks)
        small, large = (seconds_of_sum(ranks, size) for size in (SMALL, LARGE))
    blind = [rank for rank, is_seen in enumerate(seen_by) if not is_seen]
    return ClusterReport(places, shared, blind, (small, large))
