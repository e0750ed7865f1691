"""A run's parts on a Ray cluster: what each actor builds, and what the controller has in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.build.common import limits_of, load_model, load_tokenizer
from tunesmith.build.engine_worker import served
from tunesmith.build.engines import engine_settings, make_pool
from tunesmith.config.placement import Role
from tunesmith.config.schema import ModelReward, RLConfig
from tunesmith.errors import EngineLostError, RewardError, TrainerLostError
from tunesmith.loop.checkpoint import Checkpoints
from tunesmith.loop.opening import Outcome
from tunesmith.monitor.run_dir import RunDir
from tunesmith.monitor.timeline import Timeline
from tunesmith.plan.cluster import bundles, processes
from tunesmith.plan.hardware import Limits

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.backends.torch import TorchBackend
    from tunesmith.cluster.ray_cluster import Cluster
    from tunesmith.cluster.trainer import RayBackend
    from tunesmith.data.forest import Forest, Predictions
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.reward_model import RewardModel
    from tunesmith.weights.base import Plane


TRAINING: tuple[Role, ...] = ("actor", "ref", "critic", "rollout")
"""What is built anew when a run resumes by itself."""


@dataclass(slots=True)
class Hosted:
    """In the actor of a trainer or a critic."""

    backend: TorchBackend[Any]
    limits: Limits
    """Of the device there."""
    plane: Plane | None = None

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.backend.model.module.state_dict().items()}


@dataclass(slots=True)
class HostedReference:
    """In the actor of a reference."""

    model: CausalLM
    predict: Callable[[CausalLM, Forest], Predictions]

    def score(self, forest: Forest) -> Predictions:
        from tunesmith.backends.torch import scored

        return scored(self.model, self.predict, forest)

    def take(self, weights: dict[str, Tensor]) -> None:
        self.model.module.load_state_dict(weights)

    def save(self, directory: Path) -> None:
        self.model.save(directory)

    def load(self, directory: Path) -> None:
        from tunesmith.backends.torch import load_weights

        load_weights(self.model, directory)


def host_trainer(config: RLConfig) -> Hosted:
    """Called in the trainer's actor."""
    from tunesmith.build.planes import make_plane
    from tunesmith.build.policy import policy_backend
    from tunesmith.models.causal_lm import CausalLM

    tokenizer = load_tokenizer(config)
    model = load_model(CausalLM, config, tokenizer)
    backend = policy_backend(config, tokenizer, model, reference="ref" not in processes(config))
    return Hosted(backend, limits_of(config), make_plane(config, model))


def host_reference(config: RLConfig) -> HostedReference:
    """Called in the reference's actor."""
    from tunesmith.build.policy import policy_predict
    from tunesmith.models.causal_lm import CausalLM

    return HostedReference(load_model(CausalLM, config, load_tokenizer(config)), policy_predict(config))


def host_critic(config: RLConfig) -> Hosted:
    """Called in the critic's actor; ``config`` is the critic's own."""
    from tunesmith.build.critic import critic_backend

    return Hosted(critic_backend(config, load_tokenizer(config)), limits_of(config))


def open_cluster(config: RLConfig) -> AbstractContextManager[Cluster | None]:
    """The cluster of ``[system]``, with places for all processes of a resolved run; None where it names none.

    Raises:
        ClusterError: it cannot be reached, or is too small.
    """
    if config.system.cluster == "none":
        return nullcontext()
    from tunesmith.cluster.ray_cluster import Cluster

    wanted = bundles(config)
    print(f"Ray: {', '.join(f'{n} {role}' for role, n in processes(config).items())}", flush=True)
    return Cluster.open(config.system, wanted)


def remote_trainer(cluster: Cluster, config: RLConfig) -> tuple[RayBackend, Limits]:
    """The policy's trainer, and its reference where that has a process of its own."""
    from tunesmith.cluster.trainer import RayBackend

    remote = cluster.spawn("actor", TrainerLostError)
    reference = None
    if "ref" in processes(config):
        reference = cluster.spawn("ref", TrainerLostError)
        reference.make(partial(host_reference, config))
    remote.make(partial(host_trainer, config))
    return RayBackend(remote, reference), remote.get("limits")


def remote_critic(cluster: Cluster, config: RLConfig) -> tuple[RayBackend, Limits]:
    from tunesmith.cluster.trainer import RayBackend

    remote = cluster.spawn("critic", TrainerLostError)
    remote.make(partial(host_critic, config))
    return RayBackend(remote), remote.get("limits")


def remote_engines(
    cluster: Cluster, config: RLConfig, backend: RayBackend, report: Callable[[str], None], timeline: Timeline | None
) -> RolloutEngine:
    """A pool of engines, each an actor, with the weights of the trainer's."""
    from tunesmith.cluster.engine import RayEngine
    from tunesmith.cluster.trainer import RayPlane

    async def start(number: int) -> RayEngine:
        del number
        remote = cluster.spawn("rollout", EngineLostError, config.system.engine_python)
        try:
            await remote.make_heard(partial(served, engine_settings(config)))
        except BaseException:
            remote.close()
            raise
        return RayEngine(remote)

    return make_pool(config, start, RayPlane(backend.remote), report, timeline)


def remote_reward_model(
    cluster: Cluster, config: RLConfig, entry: ModelReward, report: Callable[[str], None]
) -> RewardModel:
    """A reward model that scores in an actor; it encodes texts here."""
    from tunesmith.build.rewards import load_reward_model
    from tunesmith.cluster.remote import Remote
    from tunesmith.cluster.reward import RayRewardModel, Replaced

    def start() -> Remote:
        remote = cluster.spawn("reward", RewardError)
        remote.make(partial(load_reward_model, config, entry))
        return remote

    return RayRewardModel.of(Replaced(start, config.system.trainer_restarts, report))


def resuming(
    attempt: Callable[[Path | None], Outcome],
    config: RLConfig,
    run_dir: RunDir,
    checkpoint: Path | None,
    cluster: Cluster | None,
) -> Outcome:
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
