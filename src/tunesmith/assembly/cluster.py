"""A run's parts on a Ray cluster: what each actor builds, and what the controller has in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.assembly.common import limits_of, load_model, load_tokenizer
from tunesmith.assembly.engines import engine_settings, make_pool, start_engine
from tunesmith.assembly.opening import RunResult
from tunesmith.config.placement import Role
from tunesmith.config.schema import ModelReward, RLConfig
from tunesmith.distributed.far import gather
from tunesmith.errors import RewardError, TrainerLostError
from tunesmith.loop.checkpoint import Checkpoints
from tunesmith.monitor.run_dir import RunDir
from tunesmith.monitor.timeline import Timeline
from tunesmith.monitor.waits import long_wait
from tunesmith.plan.cluster import bundles, processes
from tunesmith.plan.cost import PeakRates

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.backends.base import Quantity
    from tunesmith.backends.ranked import RankedBackend
    from tunesmith.backends.torch import TorchBackend
    from tunesmith.data.batch import Floats
    from tunesmith.data.forest import Forest, Packing, Predictions
    from tunesmith.distributed.far import Far
    from tunesmith.distributed.ray_cluster import RayCluster
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.rewards.model import RewardModel
    from tunesmith.weights.base import Plane


TRAINING: tuple[Role, ...] = ("actor", "ref", "critic", "rollout")
"""What is built anew when a run resumes by itself. Roles are named as in verl: ``actor`` trains the policy."""


@dataclass(slots=True)
class TrainerActor:
    """In each Ray actor of a trainer or a critic; the first has what counts once."""

    backend: TorchBackend[Any]
    limits: PeakRates | None
    """Of the device there."""
    plane: Plane | None = None
    store: Any = field(default=None, init=False)

    def open_store(self) -> tuple[str, int]:
        """Host and port at which the ranks find each other."""
        from tunesmith.distributed.process_group import open_store
        from tunesmith.distributed.rank_group import PATIENCE
        from tunesmith.distributed.ray_actor import node_address

        self.store = open_store(node_address(), PATIENCE)
        return node_address(), self.store.port

    def join(self, rank: int, world: int, host: str, port: int) -> None:
        from tunesmith.distributed.rank_group import RankGroup, reach_store
        from tunesmith.distributed.ray_actor import node_address

        store = self.store or reach_store(host, port)
        self.backend.join(RankGroup(store, rank, world, node_address(), self.backend.model.device))

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.backend.model.module.state_dict().items()}


@dataclass(slots=True)
class ReferenceActor:
    """In the Ray actor of a reference."""

    model: CausalLM
    predict: Callable[[CausalLM, Forest], Predictions]

    def score(self, packing: Packing, of: Quantity) -> Floats:
        from tunesmith.backends.torch import score

        return score(self.model, self.predict, packing, of)

    def take(self, weights: dict[str, Tensor]) -> None:
        self.model.module.load_state_dict(weights)

    def save(self, directory: Path) -> None:
        self.model.save(directory)

    def load(self, directory: Path) -> None:
        from tunesmith.backends.torch import load_weights

        load_weights(self.model, directory)


def host_trainer(config: RLConfig, rank: int = 0) -> TrainerActor:
    """Called in each of the trainer's actors."""
    from tunesmith.assembly.planes import make_plane
    from tunesmith.assembly.policy import policy_backend
    from tunesmith.models.causal_lm import CausalLM

    tokenizer = load_tokenizer(config)
    model = load_model(CausalLM, config, tokenizer)
    backend = policy_backend(config, tokenizer, model, reference="ref" not in processes(config))
    if rank > 0:
        return TrainerActor(backend, None)
    return TrainerActor(backend, limits_of(config), make_plane(config, model))


def host_reference(config: RLConfig) -> ReferenceActor:
    """Called in the reference's actor."""
    from tunesmith.assembly.policy import policy_predict
    from tunesmith.models.causal_lm import CausalLM

    return ReferenceActor(load_model(CausalLM, config, load_tokenizer(config)), policy_predict(config))


def host_critic(config: RLConfig, rank: int = 0) -> TrainerActor:
    """Called in each of the critic's actors; ``config`` is the critic's own."""
    from tunesmith.assembly.critic import critic_backend

    return TrainerActor(critic_backend(config, load_tokenizer(config)), limits_of(config) if rank == 0 else None)


def open_cluster(config: RLConfig) -> AbstractContextManager[RayCluster | None]:
    """The cluster of ``[system]``, with places for all processes of a resolved run; None where it names none.

    Raises:
        ClusterError: it cannot be reached, or is too small.
    """
    if config.system.cluster == "none":
        return nullcontext()
    from tunesmith.distributed.ray_cluster import RayCluster

    wanted = bundles(config)
    print(f"Ray: {', '.join(f'{n} {role}' for role, n in processes(config).items())}", flush=True)
    with long_wait("starting or joining the Ray cluster"):
        return RayCluster.open(config.system, wanted)


def remote_trainer(cluster: RayCluster, config: RLConfig) -> tuple[RankedBackend, PeakRates]:
    """The policy's trainer, and its reference where that has a process of its own."""
    from tunesmith.backends.ranked import RankedBackend

    replicas = _replicas(cluster, config, "actor", host_trainer)
    reference = None
    if "ref" in processes(config):
        reference = cluster.spawn("ref", TrainerLostError)
        with long_wait("starting the reference's process"):
            reference.make(partial(host_reference, config)).result()
    return RankedBackend(replicas, reference), _limits(replicas)


def remote_critic(cluster: RayCluster, config: RLConfig) -> tuple[RankedBackend, PeakRates]:
    from tunesmith.backends.ranked import RankedBackend

    replicas = _replicas(cluster, config, "critic", host_critic)
    return RankedBackend(replicas), _limits(replicas)


def _replicas(
    cluster: RayCluster, config: RLConfig, role: Role, host: Callable[[RLConfig, int], TrainerActor]
) -> Sequence[Far]:
    """The processes of a role, ``system.trainer_ranks`` of them, which train one model together."""
    world = config.system.trainer_ranks
    replicas = [cluster.spawn(role, TrainerLostError) for _ in range(world)]
    with long_wait(f"starting the {role}'s processes"):
        gather(far.make(partial(host, config, rank)) for rank, far in enumerate(replicas))
    if world > 1:
        place = replicas[0].call("open_store")
        gather(far.submit("join", rank, world, *place) for rank, far in enumerate(replicas))
    return replicas


def _limits(replicas: Sequence[Far]) -> PeakRates:
    """Of all their devices together, which are alike."""
    one: PeakRates = replicas[0].get("limits")
    return PeakRates(len(replicas) * one.flops_per_second, len(replicas) * one.bytes_per_second)


def remote_engines(
    cluster: RayCluster,
    config: RLConfig,
    backend: RankedBackend,
    report: Callable[[str], None],
    timeline: Timeline | None,
) -> RolloutEngine:
    """A pool of engines, each a Ray actor, with the weights of the trainer's."""
    from tunesmith.weights.far import FarPlane

    start = partial(start_engine, cluster, config, engine_settings(config))
    return make_pool(config, start, FarPlane(backend.first), report, timeline)


def remote_reward_model(
    cluster: RayCluster, config: RLConfig, entry: ModelReward, report: Callable[[str], None]
) -> RewardModel:
    """A reward model that scores in an actor; it encodes texts here."""
    from tunesmith.assembly.rewards import load_reward_model
    from tunesmith.rewards.far_model import RestartingFar, far_reward_model

    def start() -> Far:
        far = cluster.spawn("reward", RewardError)
        with long_wait(f"starting the process of reward model {entry.path}", report):
            far.make(partial(load_reward_model, config, entry)).result()
        return far

    return far_reward_model(RestartingFar(start, config.system.trainer_restarts, report))


def run_with_restarts(
    attempt: Callable[[Path | None], RunResult],
    config: RLConfig,
    run_dir: RunDir,
    checkpoint: Path | None,
    cluster: RayCluster | None,
) -> RunResult:
    """A run from ``checkpoint`` on, begun again from its newest one when its trainer, reference or critic dies.

    ``system.trainer_restarts`` times; a run that has no checkpoint yet begins again where it began.
    """
    checkpoints = Checkpoints(run_dir.checkpoints, config.checkpoint.keep)
    before, left = checkpoints.newest(), config.system.trainer_restarts
    while True:
        try:
            return attempt(checkpoint)
        except TrainerLostError as lost:
            if not left:
                raise TrainerLostError(f"{lost}, once too often (system.trainer_restarts)") from lost
            left -= 1
            assert cluster is not None, "only a cluster's trainers are elsewhere"
            cluster.close(*TRAINING)
            newest = checkpoints.newest()
            if newest != before:  # what was there already may be of a course that this run went back from
                checkpoint = newest
            place = checkpoint or "the beginning, there being no checkpoint yet"
            print(f"{lost}: the run goes on from {place}; {left} more times", flush=True)
