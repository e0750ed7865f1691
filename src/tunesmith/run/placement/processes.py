"""A run's parts in other processes: what each process builds, and the run's handles to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tunesmith.config.schema import ModelReward, RLConfig, RunConfig
from tunesmith.config.system import Role
from tunesmith.costs import PeakRates
from tunesmith.errors import RewardError, TrainerLostError
from tunesmith.learn.usercode.far import gather
from tunesmith.plan.cluster import NAMES, bundles, processes
from tunesmith.plan.plan import devices_of
from tunesmith.records.waits import long_wait
from tunesmith.run.loop.checkpoint import Checkpoints
from tunesmith.run.placement.engines import local_gpus
from tunesmith.run.placement.machines import Machine, RankHost, check_machines, look
from tunesmith.run.placement.models import limits_of, load_model, load_tokenizer, policy_predict
from tunesmith.run.placement.opening import OpenRun
from tunesmith.run.placement.session import RunResult
from tunesmith.run.processes.local import LocalProcesses, Processes
from tunesmith.run.processes.torchrun import Launch, LaunchedProcesses, meeting

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.learn.usercode.far import Far
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.run.processes.rank_group import RankGroup
    from tunesmith.run.trainers.passes import Passes
    from tunesmith.run.trainers.ranked import RankedBackend
    from tunesmith.run.trainers.torch import TorchBackend
    from tunesmith.run.weights.base import Plane


TRAINING: tuple[Role, ...] = ("actor", "ref", "critic", "rollout")
"""Roles that are rebuilt when a run resumes automatically; named as in verl: ``actor`` trains the
policy."""


C = TypeVar("C", bound=RunConfig)
MakeBackend = Callable[[Any, Any], "TorchBackend[Any]"]
"""Builds a backend from configuration and tokenizer; a module-level function, so that it can be
pickled."""


@dataclass(slots=True)
class ModelHost(RankHost, Generic[C]):
    """The object in each process that holds a model; ``build`` must be called first."""

    config: C

    def __post_init__(self) -> None:
        from tunesmith.run.placement.planes import own_address

        self.address = own_address(self.config)

    def meet(
        self, rank: int, world: int, place: tuple[str, int] | None, *, shared: bool
    ) -> RankGroup | None:
        """Join the other processes.

        Args:
            place: the result of ``open_store`` on the first rank; None if there are no others.
            shared: also make torch.distributed's default group, which sharded models use.
        """
        from tunesmith.run.processes.rank_group import join_default_group

        if place is None:
            return None
        device = self.config.system.device
        group = self.join(rank, world, place, device)
        if shared:
            join_default_group(self.store, rank, world, self.address, device)
        return group


@dataclass(slots=True)
class TrainerHost(ModelHost[RunConfig]):
    """The object in each process of a trainer or a critic."""

    make: MakeBackend
    publishes: bool
    """Whether engines get its weights."""
    backend: TorchBackend[Any] = field(init=False)
    limits: PeakRates | None = field(default=None, init=False)
    """Peak rates of the device, on the first rank only."""
    plane: Plane | None = field(default=None, init=False)

    def look(self, probe: Path) -> Machine:
        return look(self.config.model.path, probe)

    def build(self, rank: int, world: int, place: tuple[str, int] | None) -> None:
        """Join the other ranks and load the model. Args: see ``meet``."""
        from tunesmith.run.placement.planes import make_plane, make_publishing

        system = self.config.system
        sharded = bool(system.zero_stage) or system.offload_parameters
        group = self.meet(rank, world, place, shared=sharded or system.sequence_parallel.size > 1)
        with redirect_stdout(None) if rank else nullcontext():  # all ranks would print the same
            self.backend = self.make(self.config, load_tokenizer(self.config))
        if group:
            self.backend.join(group)
        if self.publishes and rank < devices_of(self.config).publishing_ranks:
            model = self.backend.model
            self.plane = (
                make_publishing(self.config, model, rank)
                if rank
                else make_plane(self.config, model)
            )
        self.limits = None if rank else limits_of(self.config)

    def weights(self) -> dict[str, Tensor]:
        """All weights, on the first rank; all ranks of a sharded model call this together."""
        from tunesmith.models.parallel.sharding import whole_weights

        model = self.backend.model
        first = self.backend.group is None or self.backend.group.rank == 0
        gathers = first or (model.sharding is not None and model.sharding.first_copy)
        named = whole_weights(model.module, model.dtype) if gathers else ()
        return {name: tensor for name, tensor in named if first}


@dataclass(slots=True)
class FrozenHost(ModelHost[RLConfig]):
    """The object in each process of a frozen model.

    Processes that share the model make the same calls together.
    """

    rank: int = field(default=0, init=False)

    def build(self, rank: int, world: int, place: tuple[str, int] | None) -> None:
        """Load the model.

        Args:
            rank: index among ``world`` processes that share the model; those with a whole model are
                numbered too.
            place: the result of ``open_store`` on the first process that shares it; None if each
                has the whole model.
        """
        self.rank = rank
        group = self.meet(rank, world, place, shared=True)
        sequence = self.config.system.sequence_parallel.model_copy(update={"size": 1})
        changed = {"zero_stage": 3, "shard_size": world, "sequence_parallel": sequence}
        config = self.config.model_copy(
            update={"system": self.config.system.model_copy(update=changed)}
        )
        self.load_model(config, group)

    def load_model(self, config: RLConfig, group: RankGroup | None) -> None:
        """Args: config: with this model's sharding; group: the processes that share it; None if it
        is not shared."""
        raise NotImplementedError


@dataclass(slots=True)
class ReferenceHost(FrozenHost):
    """The object in each process of a reference."""

    passes: Passes[CausalLM] = field(init=False)

    def load_model(self, config: RLConfig, group: RankGroup | None) -> None:
        from tunesmith.models.causal_lm import CausalLM
        from tunesmith.run.trainers.passes import Passes

        model = load_model(CausalLM, config, load_tokenizer(config), frozen=True)
        self.passes = Passes(model, policy_predict(config), group)

    def take(self, weights: dict[str, Tensor]) -> None:
        from tunesmith.models.parallel.shard_files import fill

        fill(
            self.passes.model.module,
            lambda name, start, count: weights[name][start : start + count],
            {*weights},
        )

    def save(self, directory: Path) -> None:
        """Write the model: the first process the whole model, or each process its part."""
        if self.rank == 0 or self.passes.model.sharding is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self.passes.model.save(directory)

    def load(self, directory: Path) -> None:
        from tunesmith.run.trainers.torch import load_weights

        load_weights(self.passes.model, directory)


@dataclass(slots=True)
class RewardHost(FrozenHost):
    """The object in each process of a reward model."""

    entry: ModelReward
    model: RewardModel = field(init=False)

    def load_model(self, config: RLConfig, group: RankGroup | None) -> None:
        from tunesmith.run.placement.rewards import load_reward_model

        self.model = load_reward_model(config, self.entry, group)


def _build(fars: Sequence[Far], together: int) -> None:
    """Make hosts load their models; ``together`` of them share one: either all, or 1."""
    place = fars[0].call("open_store") if together > 1 else None
    gather(far.submit("build", rank, together, place) for rank, far in enumerate(fars))


def _start_reference(processes: Processes, config: RLConfig) -> list[Far]:
    """The processes of a reference: each holds the whole model or, if trainer ranks shard weights,
    its shard."""
    count = devices_of(config).scoring_processes("ref")
    references = [processes.spawn("ref", TrainerLostError) for _ in range(count)]
    with long_wait("starting the reference's processes"):
        gather(far.make(partial(ReferenceHost, config)) for far in references)
        _build(references, devices_of(config).scoring_shards("ref"))
    return references


def open_processes(config: RunConfig) -> AbstractContextManager[Processes | None]:
    """The starter of a resolved run's processes; None: the run's own process trains.

    Raises:
        ClusterError: the cluster cannot be reached or is too small.
    """
    if config.system.cluster == "ray":
        from tunesmith.run.processes.ray_cluster import RayCluster

        assert isinstance(config, RLConfig)
        wanted = bundles(devices_of(config))
        print(
            f"Ray: {', '.join(f'{n} {role}' for role, n in processes(devices_of(config)).items())}",
            flush=True,
        )
        with long_wait("starting or joining the Ray cluster"):
            return RayCluster.open(config.system, wanted)
    if config.system.trainer_ranks == 1:
        return nullcontext()
    gpus = local_gpus(config)
    met = meeting()
    return LaunchedProcesses(met, gpus) if met else LocalProcesses(gpus)


def remote_trainer(
    processes: Processes,
    config: RunConfig,
    make: MakeBackend,
    role: Role = "actor",
    run_dir: Path | None = None,
) -> tuple[RankedBackend, PeakRates]:
    """The ranks of a trainer, which train one model together, and its reference if that has its own
    processes.

    Args:
        run_dir: a directory that all ranks must see if a launcher started them on several machines.
    """
    from tunesmith.run.trainers.ranked import RankedBackend

    world = config.system.trainer_ranks
    publishes = isinstance(config, RLConfig) and role == "actor"
    ranks = [processes.spawn(role, TrainerLostError) for _ in range(world)]
    host = partial(TrainerHost, config, make, publishes)
    with long_wait(f"starting {world} processes of the {NAMES[role]}"):
        gather(far.make(host) for far in ranks)
        if run_dir and (launch := Launch.of()) and launch.several_machines:
            check_machines(ranks, config.model.path, run_dir)
        _build(ranks, world)
    references: list[Far] = []
    if publishes and isinstance(config, RLConfig) and devices_of(config).reference_apart:
        references = _start_reference(processes, config)
    one: PeakRates = ranks[0].get("limits")
    limits = PeakRates(world * one.flops_per_second, world * one.bytes_per_second)
    return RankedBackend(ranks, references, config.system.sequence_parallel.size), limits


def remote_reward_model(
    processes: Processes, config: RLConfig, entry: ModelReward, report: Callable[[str], None]
) -> RewardModel:
    """A reward model that scores in other processes and encodes texts in this one."""
    from tunesmith.learn.rewards.far_model import RestartingFars, far_reward_model

    shards = devices_of(config).scoring_shards("reward")

    def start() -> list[Far]:
        fars = [processes.spawn("reward", RewardError) for _ in range(shards)]
        with long_wait(f"starting reward model {entry.path}", report):
            gather(far.make(partial(RewardHost, config, entry)) for far in fars)
            _build(fars, shards)
        return fars

    restarts = config.system.trainer_restarts
    copies = devices_of(config).scoring_processes("reward") // shards
    return far_reward_model([RestartingFars(start, restarts, report) for _ in range(copies)])


def run_with_restarts(
    attempt: Callable[[Path | None], RunResult], run: OpenRun[Any, Any], processes: Processes | None
) -> RunResult:
    """Run, resuming from the newest checkpoint when a trainer, reference or critic process dies.

    It resumes up to ``system.trainer_restarts`` times; without a checkpoint it starts over from
    where it began.
    """
    config = run.config
    checkpoint = run.checkpoint
    checkpoints = Checkpoints(run.directory.checkpoints, config.checkpoint.keep)
    before = checkpoints.newest()
    left = config.system.trainer_restarts
    while True:
        try:
            return attempt(checkpoint)
        except TrainerLostError as lost:
            if meeting():  # the launcher ends all processes when one has ended
                raise
            if not left:
                raise TrainerLostError(
                    f"{lost}, once too often (system.trainer_restarts)"
                ) from lost
            left -= 1
            assert processes is not None, "only a trainer elsewhere is lost"
            processes.close(*TRAINING)
            newest = checkpoints.newest()
            if newest != before:  # an older one may belong to a course that this run abandoned
                checkpoint = newest
            place = checkpoint or "the beginning, as there is no checkpoint yet"
            print(f"{lost}: the run continues from {place}; {left} more times", flush=True)
