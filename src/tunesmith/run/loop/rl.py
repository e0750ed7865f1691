"""Reinforcement learning: collect rollouts, estimate advantages, learn, repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

from tunesmith.errors import RewardError
from tunesmith.learn.algorithms.objective import policy_objective
from tunesmith.records import interrupts
from tunesmith.run.loop.evaluate import EvaluationPlan, evaluate
from tunesmith.run.loop.experience import make_experience
from tunesmith.run.loop.groups import update_trainer_state
from tunesmith.run.loop.parts import RLParts
from tunesmith.run.loop.rollouts import RolloutSource
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.run.loop.session import Session
from tunesmith.run.loop.teacher import ALIGNED
from tunesmith.run.loop.utilisation import Utilisation
from tunesmith.run.trainers.base import Metrics
from tunesmith.types import RolloutGroup


async def run(parts: RLParts, session: Session, rollouts: RolloutSource) -> None:
    """Train until the configured step; evaluate and save on the way. Closes ``rollouts`` and the
    engine."""
    use = Utilisation(parts.engines)
    try:
        # At the start; or after a resume, if a signal prevented it.
        await _evaluate_and_save(parts, session, rollouts)
        while session.running:
            with session.phase("sync"):
                await rollouts.sync()
                compared = await parts.canary.check(session.step) if parts.canary else {}
            with session.phase("rollout"):
                groups, metrics = await rollouts.next()
            with session.phase("train"):
                async with rollouts.training() as thread:
                    work = thread.submit(learn, parts, groups, session.step)
                    learned = await asyncio.wrap_future(work)
            if not groups:
                session.note(f"step {session.step + 1} had no group to learn from")
            reference = parts.algorithm.reference
            every = reference and reference.reference_every
            if every and (session.step + 1) % every == 0:
                interrupts.commit()  # a signal waits until the step is counted
                parts.backend.refresh_reference()
            metrics |= learned | compared | use.metrics(session.step)
            session.finish_step(metrics, groups)
            await _evaluate_and_save(parts, session, rollouts)
        if session.checkpoints.newest() is None:
            session.save()
    except interrupts.Interrupted:
        interrupts.keep_now()
        raise
    finally:
        try:
            await rollouts.close()
        finally:
            await parts.engine.close()


def learn(parts: RLParts, groups: Sequence[RolloutGroup], step: int) -> Metrics:
    """Compute advantages, then take optimizer steps: the critic's, and the policy's unless it is
    still frozen.

    An empty batch takes none.
    """
    said = parts.plan.said
    seed = derive_seed(said.train.seed, step)
    with parts.learner.time_scoring() as scored:
        batch = make_experience(
            groups,
            parts.algorithm,
            parts.learner,
            kl_coef=parts.kl.coef,
            max_new_tokens=said.rollout.max_new_tokens,
            seed=seed,
            critic=parts.critic,
            reward_weights=parts.rewards.weights,
            teacher=parts.teacher,
        )
    metrics: Metrics = {"optimizer_steps": 0.0, "attainable_seconds/train": 0.0, **scored}
    if not batch.num_samples:
        return metrics
    if ALIGNED in batch.columns:
        metrics[ALIGNED] = float(batch.columns[ALIGNED].mean())
    batch_size = parts.plan.training.batch
    assert batch_size is not None, "the run trains"
    if parts.critic:
        metrics |= parts.critic.learn(batch, batch_size, seed)
    if step >= said.critic.freeze_actor_steps:
        # A new objective each step: an adaptive KL coefficient is part of it.
        objective = parts.objective or policy_objective(parts.algorithm, kl_coef=parts.kl.coef)
        objective = parts.critic.join(objective) if parts.critic else objective
        metrics |= parts.learner.update(
            batch, objective, batch_size=batch_size, passes=said.train.passes_per_batch, seed=seed
        )
        if parts.kl.target is not None:
            metrics["kl_coef"] = parts.kl.update(metrics["ref_kl"], batch.num_rollouts)
        if "ref_kl" in metrics:
            metrics[parts.kl_name] = metrics.pop("ref_kl")
    least = [metrics.pop(name, 0.0) for name in ("attainable_seconds", "critic/attainable_seconds")]
    return {**metrics, "attainable_seconds/train": sum(least)}


async def _evaluate_and_save(parts: RLParts, session: Session, rollouts: RolloutSource) -> None:
    """Evaluate the policy and write a checkpoint, whichever is due."""
    if parts.evaluation is not None and session.evaluation_due():
        await _evaluate(parts, parts.evaluation, session, rollouts)
    if session.checkpoint_due():
        session.save()


async def _evaluate(
    parts: RLParts, plan: EvaluationPlan, session: Session, rollouts: RolloutSource
) -> None:
    update_trainer_state(parts, session)
    average = parts.backend.ema_weights() if plan.section.use_ema else nullcontext()
    with session.phase("eval"), average:
        async with rollouts.evaluating() as collector:
            with parts.rewards.apart():
                metrics, groups = await evaluate(collector, plan)
    failed = [r for g in groups for r in g.rollouts if r.error is not None]
    what = "rollouts of the evaluation failed"
    if len(failed) == len(groups):
        raise RewardError(f"all {len(failed)} {what}. The first:\n{failed[0].error}")
    with interrupts.held():
        session.finish_evaluation(metrics, groups)
    if failed:
        session.note(f"{len(failed)} of {len(groups)} {what}; the first: {failed[0].error}")
    elif metrics["eval/failed"]:
        share = f"{metrics['eval/failed']:.1%} of the evaluation's rollouts failed"
        session.note(f"{share}, all of them samples: pass@k counts them as not passed")
