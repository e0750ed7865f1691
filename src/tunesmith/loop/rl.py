"""Reinforcement learning: collect, compare, learn, again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.algorithms.filtering import filter_groups
from tunesmith.algorithms.kl import AdaptiveController
from tunesmith.algorithms.objective import policy_objective
from tunesmith.backends.base import TrainBackend
from tunesmith.config.schema import RLConfig
from tunesmith.data.loader import Loader
from tunesmith.engines.base import RolloutEngine
from tunesmith.environments.reward_types import TrainerState
from tunesmith.environments.rewards import FailureGate, RewardSet
from tunesmith.loop.collect import Collector, derive_seed
from tunesmith.loop.evaluate import Evaluation, evaluate
from tunesmith.loop.experience import batch_metrics, experience
from tunesmith.loop.learner import Learner, Metrics
from tunesmith.loop.samples import write_samples
from tunesmith.loop.session import Session
from tunesmith.types import RolloutGroup, Sampling, Task


@dataclass(frozen=True, slots=True)
class RLParts:
    """What the loop is given; built by ``tunesmith.build``."""

    config: RLConfig
    sampling: Sampling
    tasks: Loader[Task]
    rewards: RewardSet
    collector: Collector
    engine: RolloutEngine
    backend: TrainBackend
    learner: Learner
    kl: AdaptiveController
    evaluation: Evaluation | None


async def run(parts: RLParts, session: Session) -> None:
    """Train until the configured step; evaluate and save on the way."""
    if session.step == 0 and parts.config.eval.at_start:
        await _evaluate(parts, session)
    while session.running:
        with session.phase("sync"):
            await parts.engine.load_weights(parts.backend.version)
        with session.phase("rollout"):
            groups, metrics = await gather(parts, session)
        with session.phase("train"):
            learned = learn(parts, groups, session.step)
        attainable = metrics["attainable_seconds"] + learned.get("attainable_seconds", 0.0)
        session.finish_step(metrics | learned | {"attainable_seconds": attainable})
        write_samples(session, parts.collector.decode, groups, parts.config.monitor.samples)
        if session.evaluation_due():
            await _evaluate(parts, session)
        if session.checkpoint_due():
            save(parts, session)
    if session.checkpoints.newest() is None:
        save(parts, session)


async def gather(parts: RLParts, session: Session) -> tuple[list[RolloutGroup], Metrics]:
    """The step's groups, rewarded.

    With dynamic filtering (DAPO, arXiv:2503.14476, section 3.2) groups without contrast are replaced by new
    tasks, until the batch is full or as many were tried as the data has.
    """
    config, algorithm = parts.config, parts.config.algorithm
    wanted = config.rollout.prompts_per_step
    parts.rewards.state = TrainerState(session.step, session.total_steps, float(parts.tasks.epoch))
    kept: list[RolloutGroup] = []
    tried: list[RolloutGroup] = []
    while len(kept) < wanted and len(tried) < max(wanted, len(parts.tasks)):
        tasks = parts.tasks.next_batch(wanted - len(kept))
        seed = derive_seed(config.train.seed, config.rollout.seed or 0, session.step, len(tried))
        groups = await parts.collector.collect(tasks, parts.sampling, config.rollout.group_size, seed)
        FailureGate(config.reward.max_failed_share).check([r for g in groups for r in g.rollouts])
        tried += groups
        if algorithm.dynamic_filter:
            low, high, weights = algorithm.filter_low, algorithm.filter_high, parts.rewards.weights
            kept += filter_groups(groups, low, high, weights).kept
        else:
            kept += groups
    stats = parts.engine.stats()
    return kept, {
        **batch_metrics(tried),
        **(rewards := parts.rewards.metrics([r for g in tried for r in g.rollouts])),
        **({"reward": rewards["reward/mean"]} if "reward/mean" in rewards else {}),
        "groups_kept": len(kept) / len(tried),
        "sampled_tokens": float(stats.sampled_tokens),
        "reused_prompt_tokens": float(stats.reused_prompt_tokens),
        "preemptions": float(stats.preemptions),
        "attainable_seconds": stats.attainable_seconds,
    }


def learn(parts: RLParts, groups: Sequence[RolloutGroup], step: int) -> Metrics:
    """Advantages, then optimizer steps. A batch from which nothing can be learned takes none."""
    config, learner = parts.config, parts.learner
    seed = derive_seed(config.train.seed, step)
    samples = experience(
        groups,
        config.algorithm,
        learner,
        kl_coef=parts.kl.coef,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=seed,
    )
    if not samples:
        return {"optimizer_steps": 0.0}
    learner.objective = policy_objective(config.algorithm, kl_coef=parts.kl.coef)
    batch_size = config.train.batch_size or len(samples)
    metrics = learner.update(samples, batch_size, config.train.updates_per_batch, seed, config.rollout.group_size)
    metrics["kl"] = metrics.get("ref_kl", metrics["policy_kl"])
    if config.algorithm.kl_target is not None:
        metrics["kl_coef"] = parts.kl.update(metrics["kl"], len(samples))
    return metrics


async def _evaluate(parts: RLParts, session: Session) -> None:
    if parts.evaluation is None:
        return
    with session.phase("eval"):
        await parts.engine.load_weights(parts.backend.version)
        metrics, groups = await evaluate(parts.collector, parts.evaluation)
    parts.engine.stats()  # Dropped, so that the next step counts its own alone.
    session.finish_evaluation(metrics)
    write_samples(session, parts.collector.decode, groups, parts.config.monitor.samples, "eval")


def save(parts: RLParts, session: Session) -> None:
    state = {
        "tasks": parts.tasks.state_dict(),
        "max_tokens": parts.learner.max_tokens,
        "kl": parts.kl.state_dict(),
    }
    session.save(state, parts.backend.save)


def restore(parts: RLParts, session: Session) -> None:
    """Continue from the session's checkpoint, if there is one."""
    if (state := session.restore(parts.backend.load)) is not None:
        parts.tasks.load_state_dict(state["tasks"])
        parts.learner.resume(state["max_tokens"])
        parts.kl.load_state_dict(state["kl"])
