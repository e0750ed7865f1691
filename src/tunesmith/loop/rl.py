"""Reinforcement learning: collect rollouts, estimate advantages, learn, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from tunesmith.algorithms.objective import policy_objective
from tunesmith.backends.base import Metrics
from tunesmith.config.commands import DistillConfig
from tunesmith.errors import RewardError
from tunesmith.loop.evaluate import evaluate
from tunesmith.loop.experience import make_experience
from tunesmith.loop.parts import RLParts
from tunesmith.loop.rollouts import RolloutSource
from tunesmith.loop.seeds import derive_seed
from tunesmith.loop.session import Session
from tunesmith.monitor import interrupts
from tunesmith.types import RolloutGroup


async def run(parts: RLParts, session: Session, rollouts: RolloutSource) -> None:
    """Train until the configured step; evaluate and save on the way. Closes ``rollouts``."""
    try:
        session.begin(parts.state(), parts.tasks.epoch)
        if session.owes_evaluation(parts.config.eval.at_start):
            await _evaluate(parts, session, rollouts)
            if session.step and session.evaluated and session.checkpoint_due():
                session.save(parts.write)
        while session.running:
            with session.phase("sync"):
                await rollouts.sync()
                compared = await parts.canary.check(session.step) if parts.canary else {}
            with session.phase("rollout"):
                groups, metrics = await rollouts.next()
            with session.phase("train"):
                learned = await rollouts.run_training(partial(learn, parts, groups, session.step))
            if not groups:
                session.note(f"step {session.step + 1} had no group to learn from")
            session.finish_step(metrics | learned | compared)  # from here on the step counts as done
            reference = parts.config.algorithm.reference
            if reference and reference.reference_every and session.step % reference.reference_every == 0:
                parts.backend.refresh_reference()
            session.log_rollouts(groups)
            session.settle(parts.state(), parts.tasks.epoch)
            if session.evaluation_due():
                await _evaluate(parts, session, rollouts)
            if session.checkpoint_due():
                session.save(parts.write)
        if session.checkpoints.newest() is None:
            session.save(parts.write)
    except interrupts.Interrupted:
        interrupts.keep_now()
        raise
    finally:
        await rollouts.close()


def learn(parts: RLParts, groups: Sequence[RolloutGroup], step: int) -> Metrics:
    """Compute advantages, then take optimizer steps: the critic's, and the policy's unless it is still frozen.

    An empty batch takes none.
    """
    config = parts.config
    seed = derive_seed(config.train.seed, step)
    with parts.learner.timed_scoring() as scored:
        batch = make_experience(
            groups,
            config.algorithm,
            parts.learner,
            kl_coef=parts.kl.coef,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=seed,
            critic=parts.critic,
            reward_weights=parts.rewards.weights,
        )
    metrics: Metrics = {"optimizer_steps": 0.0, "attainable_seconds/train": 0.0, **scored}
    if not batch.num_samples:
        return metrics
    batch_size = config.train.batch_size
    if parts.critic:
        metrics |= parts.critic.learn(batch, batch_size, seed)
    if step >= config.critic.freeze_actor_steps:
        # A new objective each step: an adaptive KL coefficient is part of it.
        objective = parts.objective or policy_objective(config.algorithm, kl_coef=parts.kl.coef)
        objective = parts.critic.join(objective) if parts.critic else objective
        passes = config.train.passes_per_batch
        metrics |= parts.learner.update(batch, objective, batch_size=batch_size, passes=passes, seed=seed)
        if isinstance(config, DistillConfig) and "ref_kl" in metrics:  # the teacher takes the reference's place
            metrics["teacher_kl"] = metrics.pop("ref_kl")
        if parts.kl.target is not None:
            metrics["kl_coef"] = parts.kl.update(metrics["ref_kl"], batch.num_rollouts)
    least = [metrics.pop(name, 0.0) for name in ("attainable_seconds", "critic/attainable_seconds")]
    return {**metrics, "attainable_seconds/train": sum(least)}


async def _evaluate(parts: RLParts, session: Session, rollouts: RolloutSource) -> None:
    if parts.evaluation is None:
        return
    with session.phase("eval"), parts.backend.ema_weights() if parts.config.eval.use_ema else nullcontext():
        async with rollouts.evaluating() as collector:
            with parts.rewards.apart():
                metrics, groups = await evaluate(collector, parts.evaluation)
    failed = [r for g in groups for r in g.rollouts if r.error is not None]
    if metrics["eval/failed"] == 1:
        raise RewardError(f"all {len(failed)} rollouts of the evaluation failed. The first:\n{failed[0].error}")
    with interrupts.held():
        session.log_rollouts(groups, "eval")
        session.finish_evaluation(metrics)
    if failed:
        session.note(f"{len(failed)} of {len(groups)} rollouts of the evaluation failed; the first: {failed[0].error}")
