"""The devices of a run: its processes, what each of them shares, and the GPUs that engines get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from tunesmith.config.engines import EngineKind, EngineWeights
from tunesmith.config.system import PlacementSection, Role
from tunesmith.errors import Problem
from tunesmith.plan.facts.experts import ExpertsImplementation
from tunesmith.plan.kind import RunKind

NOT_PLACED = PlacementSection()
BUCKET = 64 << 20
"""Bytes of whole tensors that are sent or checked at a time; a larger tensor is sent by itself."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where an engine can run."""

    machine: int
    """The number of a launcher's machine; 0 is the one on which the command runs."""
    gpus: tuple[int, ...] | None
    """The numbers of its GPUs there; None: it sees those that the processes there see."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Processes of a run by role, their devices, and how weights travel between them."""

    kind: RunKind
    engine: EngineKind
    cluster: Literal["none", "ray"] = "none"
    device: str = ""
    """``cpu``, ``cuda`` or ``cuda:1``; empty as long as it is not known."""
    dtype: str = ""
    threads: int = 1
    """Threads of each trainer process."""
    compile: bool | str = False
    experts: ExpertsImplementation = "grouped_mm"
    machines: int = 1
    """Machines on which a launcher started processes for a run that samples and trains in one
    loop: each has engines, trainer ranks, or both."""
    ranks_per_machine: int = 1
    """Processes that a launcher started on each of several machines: the most trainer ranks
    there."""
    trainer_ranks: int = 1
    zero_stage: int = 0
    shard_size: int | None = None
    """Ranks that share one copy of the model; None: nothing is sharded, or all ranks do."""
    expert_parallel: int = 1
    """Ranks that divide the experts of each mixture: those of a copy; 1: nobody does."""
    sequence: int = 1
    """Ranks that share the tokens of a micro-batch."""
    ring: bool = False
    """Whether these ranks pass keys and values around, instead of sharing attention heads."""
    engines: int = 1
    tensor: int = 1
    """Devices over which each layer of an engine is split."""
    pipeline: int = 1
    """Groups of devices among which the layers of an engine are divided."""
    engine_process: bool = False
    hybrid: bool = False
    """Whether engine and trainer take turns on a device."""
    placement: PlacementSection = NOT_PLACED
    weight_plane: str | None = None
    weight_copy: str | None = None
    adapter_sync: str | None = None
    engine_weights: EngineWeights = "model"
    """The weights with which Tunesmith's own engine samples."""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a number in weights and activations."""
        return 4 if self.dtype == "float32" else 2

    @property
    def ranks_per_engine(self) -> int:
        """Devices over which one engine is split."""
        return self.tensor * self.pipeline if self.engine.spans_devices else 1

    @property
    def engine_devices(self) -> int:
        """Devices of all engines together."""
        return self.engines * self.ranks_per_engine

    # Who has which weights

    @property
    def engines_apart(self) -> bool:
        """Whether engines run in processes other than the trainer's, with their own copies of the
        weights."""
        several = self.kind.rl and max(self.trainer_ranks, self.machines) > 1
        return self.engine_process or self.cluster == "ray" or several

    @property
    def weights_apart(self) -> bool:
        """Whether an engine has its own copy of the weights, in this process or another."""
        return self.engine.third_party or self.engines_apart

    @property
    def loads_model(self) -> bool:
        """Whether a run that only samples loads the model in its own process."""
        return not self.weights_apart or self.kind.adapter or self.engine.served

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the trained models and their references."""
        return (self.shard_size or self.trainer_ranks) if self.zero_stage else 1

    @property
    def publishing_ranks(self) -> int:
        """The number of trainer ranks that publish weights: the first ones, which together have
        the whole model; or all, each for the engines on its device."""
        return self.trainer_ranks if self.weight_plane == "ipc" else self.shards

    @property
    def reference_apart(self) -> bool:
        """Whether the reference has its own processes: on a cluster, unless it is placed with the
        trainer, whose ranks then hold it whole or in shares."""
        together = self.placed_together("actor", "ref")
        return self.cluster != "none" and not together and self.kind.reference

    @property
    def keeps_frozen(self) -> bool:
        """Whether the trainer keeps whole frozen models: a teacher, reward models, or a reference
        that is not sharded. On a cluster, reward models have their own processes."""
        if self.kind.teacher:
            return True
        judged = self.kind.rl and self.kind.reward_models > 0 and self.cluster == "none"
        return judged or (self.kind.reference and not self.reference_apart and not self.zero_stage)

    # Who shares a device

    def placed_together(self, *roles: Role) -> bool:
        """Whether one group in ``system.placement.colocate`` has all of these roles."""
        return any(set(roles) <= set(group) for group in self.placement.colocate)

    def shares_trainer_device(self, role: Role) -> bool:
        """Whether a role's processes share the trainer's device."""
        alone = self.cluster != "none" and self.on_gpu
        return not alone or self.placed_together("actor", role)

    def scoring_processes(self, role: Role) -> int:
        """Processes of the reference, or of each reward model, if it has its own."""
        if role == "ref":
            return self.placement.ref.processes or 1
        return self.placement.reward.processes or self.placement.reward.shards or 1

    def scoring_shards(self, role: Role) -> int:
        """How many of these processes shard one copy of the model: as set, or all of them if the
        trainer's ranks shard weights too."""
        said = self.placement.reward.shards if role == "reward" else None
        return said or (self.scoring_processes(role) if self.zero_stage == 3 else 1)

    @property
    def critic_beside(self) -> bool:
        """Whether a critic's processes are on the GPUs of the trainer's ranks."""
        if not self.on_gpu or not self.kind.critic:
            return False
        if self.cluster == "none":
            return self.trainer_ranks > 1  # otherwise they are one process
        return self.placed_together("actor", "critic")

    @property
    def processes_with_trainer(self) -> int:
        """Processes on the GPU of a trainer rank, including the trainer's.

        Without a cluster, an engine that takes turns with it is counted.
        """
        if self.cluster == "none":
            return 1 + int(self.hybrid and self.engines_apart) + int(self.critic_beside)
        others: dict[Role, int] = {
            "critic": int(self.kind.critic),
            "reward": self.kind.reward_models,
            "rollout": 1,
        }
        return 1 + sum(n for role, n in others.items() if self.placed_together("actor", role))

    # The machines of a launch

    @property
    def most_ranks(self) -> int | None:
        """The most trainer ranks, if a launcher started processes on several machines."""
        return self.machines * self.ranks_per_machine if self.machines > 1 else None

    def ranks_on(self, machine: int) -> int:
        """Trainer ranks on a machine: they fill one machine after another."""
        if self.machines == 1:
            return self.trainer_ranks
        before = machine * self.ranks_per_machine
        return min(self.ranks_per_machine, max(0, self.trainer_ranks - before))

    @property
    def engines_each(self) -> int:
        """The most engines on one machine if all machines can have any number of them."""
        return ceil(self.engines / self.machines)

    def engine_places(self, gpus: int) -> list[EnginePlace]:
        """All places for engines on machines with ``gpus`` each, in the order in which engines take
        them: one on each machine, then the next one on each."""
        places: list[list[tuple[int, ...] | None]] = []
        for machine in range(self.machines):
            own = self.own_gpus(gpus, machine)
            each = ceil(self.engines / self.machines)
            places.append([None] * each if own is None else [*own])
        rounds = range(max(map(len, places)))
        every = [(number, *place) for number in rounds for place in enumerate(places)]
        return [EnginePlace(machine, there[n]) for n, machine, there in every if n < len(there)]

    def engines_on(self, machine: int, gpus: int) -> int:
        """Engines on a machine."""
        return sum(place.machine == machine for place in self.engine_places(gpus)[: self.engines])

    # The GPUs of engines

    @property
    def engines_use_all(self) -> bool:
        """Whether engines also use the trainer's GPU, because nothing trains on it while they
        sample."""
        return self.hybrid or not self.kind.rl

    def own_gpus(self, gpus: int, machine: int = 0) -> list[tuple[int, ...]] | None:
        """The GPUs of each engine on a machine with ``gpus``, for as many engines as they allow;
        None if all share the trainer's.

        The trainer shares its GPU only if it takes turns with the engines (``system.hybrid``) or
        does not train while they sample. A single GPU is always shared, and so is that of a single
        trainer if engines read its weights through CUDA IPC. Several ranks have such engines on the
        first GPUs, which are the ranks'. Of several machines, each may have other numbers of ranks
        and engines.
        """
        if not self.have_own_gpus(gpus):
            return None
        ipc = self.weight_plane == "ipc"
        trainer = int(self.device.partition(":")[2] or 0)
        ranks = self.ranks_on(machine)
        free = [*range(trainer, gpus), *range(trainer)]
        if not self.engines_use_all:
            free = free[ranks:]
        elif ipc and self.machines > 1:
            free = free[:ranks]
        each = self.ranks_per_engine
        return [tuple(free[end - each : end]) for end in range(each, len(free) + 1, each)]

    def have_own_gpus(self, gpus: int) -> bool:
        """Whether engines have their own GPUs among this machine's ``gpus``."""
        one_trainer = self.weight_plane == "ipc" and self.trainer_ranks == 1
        alone = self.machines == 1 and (gpus < 2 or one_trainer)
        return self.engine_process and self.on_gpu and not alone

    def engines_elsewhere(self, gpus: int) -> bool:
        """Whether engines have GPUs on which nothing trains."""
        if self.cluster != "none":
            return self.on_gpu and not self.shares_trainer_device("rollout")
        return not self.hybrid and self.have_own_gpus(gpus)

    def engines_together(self, gpus: int) -> int:
        """How many engines share the memory of one of this machine's ``gpus``, or of the CPU."""
        alone = self.cluster != "none" or self.have_own_gpus(gpus)
        return 1 if alone else self.engines_each

    # Threads

    @property
    def engines_share_cpu(self) -> bool:
        """Whether engine processes compute on this machine's CPU while the policy trains on it."""
        return self.kind.ahead and self.engine_process and not self.on_gpu

    @property
    def engine_threads(self) -> int:
        """Threads per engine process: as many as the trainer's if both compute concurrently, else
        a share of them."""
        return self.threads if self.engines_share_cpu else max(1, self.threads // self.engines_each)

    @property
    def computing_threads(self) -> int:
        """Threads computing concurrently on this machine's CPU, in all processes; 1 on GPUs and on
        a cluster."""
        if self.on_gpu or self.cluster != "none":
            return 1
        return self.threads * (self.ranks_on(0) + self.engines_each * self.engines_share_cpu)


def visible_names(variable: str | None, count: int) -> list[str]:
    """Names, as in ``CUDA_VISIBLE_DEVICES``, of the ``count`` GPUs that this process sees, in
    CUDA's order.

    Example:
        >>> visible_names(None, 2), visible_names("3, GPU-5a,1", 3)
        (['0', '1'], ['3', 'GPU-5a', '1'])
    """
    return [str(n) if variable is None else variable.split(",")[n].strip() for n in range(count)]


def device_problems(devices: Devices, gpus: int) -> Iterator[Problem]:
    """Requests that exceed the ``gpus`` visible GPUs of each machine."""
    ranks = devices.ranks_per_engine
    engines = devices.engines
    machines = devices.machines
    places = len(devices.engine_places(gpus)) if devices.have_own_gpus(gpus) else engines
    shared = devices.engines_use_all
    if places < engines:
        each = f"{'1 GPU' if ranks == 1 else f'{ranks} GPUs'} each"
        others = "" if shared else " and the trainer"
        wanted = engines * ranks + (0 if shared else devices.trainer_ranks)
        sees = f"this process sees {gpus}"
        if machines > 1:
            sees = f"{machines} machines have {gpus} each"
        at_once = shared or devices.kind.ahead
        turns = ", or let engines and trainer take turns: system.hybrid = true"
        yield Problem(
            ("system.engines", "system.vllm.tensor_parallel_size", "system.trainer_ranks"),
            f"system.engines = {engines} of {each}{others} take {wanted} GPUs, and {sees}, with "
            f"room for {places}. Lower system.engines or the ranks of each"
            f"{'' if at_once or engines * ranks > machines * gpus else turns}",
            "machine",
        )
    apart = devices.engine_process and devices.on_gpu
    if apart and devices.weight_plane == "nccl" and (machines * gpus == 1 or shared):
        yield Problem(
            ("system.weight_plane",),
            'system.weight_plane = "nccl" copies between GPUs, and engine and trainer share one '
            "here; leave it out",
            "machine",
        )
