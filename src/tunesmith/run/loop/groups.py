"""Plays groups of rollouts, selects those that can be learned from, and measures them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from tunesmith.learn.algorithms import filtering
from tunesmith.learn.rewards.metrics import check_failed
from tunesmith.learn.rewards.trainer_state import TrainerState
from tunesmith.learn.usercode.calls import all_or_error
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.loop.learner import Metrics
from tunesmith.run.loop.parts import RLParts
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.run.loop.session import Session
from tunesmith.types import Rollout, RolloutGroup, Task


def update_trainer_state(parts: RLParts, session: Session) -> None:
    """Update what reward functions can read about the run's progress."""
    best = session.best
    intervals = parts.plan.intervals
    evaluation = intervals.evaluation
    checkpoint = intervals.checkpoint
    parts.rewards.state = TrainerState(
        global_step=session.step,
        max_steps=session.total_steps,
        epoch=float(parts.tasks.epoch),
        logging_steps=intervals.progress,
        eval_steps=evaluation if isinstance(evaluation, int) else None,
        save_steps=checkpoint if isinstance(checkpoint, int) else None,
        best_metric=best.value,
        best_global_step=best.step,
        best_model_checkpoint=str(session.checkpoints.path(best.step)) if best.step else None,
        metrics_file=session.recorder.metrics.path,
    )


def check_failures(parts: RLParts, groups: Sequence[RolloutGroup]) -> None:
    """Stop the run if too many rollouts failed, greedy ones included."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rollouts += [group.greedy for group in groups if group.greedy]
    check_failed(rollouts, parts.plan.said.reward.max_failed_share)


def step_metrics(
    parts: RLParts,
    played: Sequence[RolloutGroup],
    batch: Sequence[RolloutGroup],
    stats: EngineStats,
) -> Metrics:
    """Metrics of the groups played for a step, of those it trains on, and of the engine since the
    last step."""
    metrics = rollout_metrics(played)
    metrics |= parts.rewards.metrics([rollout for group in played for rollout in group.rollouts])
    metrics["epoch"] = float(parts.tasks.epoch)
    if parts.tasks.rest_epochs:
        metrics["tasks_resting"] = float(parts.tasks.resting)
    return metrics | staleness_metrics(batch, parts.engine.version) | engine_metrics(stats)


def engine_metrics(stats: EngineStats) -> Metrics:
    metrics = {
        "sampled_tokens": float(stats.sampled_tokens),
        "reused_prompt_tokens": float(stats.reused_prompt_tokens),
        "preemptions": float(stats.preemptions),
        "kv_peak": float(stats.peak_kv_bytes),
    }
    prompt_tokens = stats.reused_prompt_tokens + stats.prefilled_tokens
    shares = {
        "engine_running": (stats.running_requests, stats.steps),
        "engine_waiting": (stats.waiting_requests, stats.steps),
        "prefix_hit_share": (stats.reused_prompt_tokens, prompt_tokens),
        "kv_used": (stats.peak_kv_bytes, stats.kv_budget_bytes),
        "draft_acceptance": (stats.accepted_tokens, stats.drafted_tokens),
    }
    metrics |= {name: part / whole for name, (part, whole) in shares.items() if whole}
    if stats.sync_bytes and stats.sync_seconds:
        metrics["sync_bytes"] = float(stats.sync_bytes)
        metrics["sync_bytes_per_second"] = stats.sync_bytes / stats.sync_seconds
    # Otherwise the engine's limits are unknown, and so are the step's.
    if stats.attainable_seconds or not prompt_tokens:
        metrics["attainable_seconds"] = stats.attainable_seconds
    return metrics


async def play(parts: RLParts, tasks: Sequence[Task], *place: int | str) -> list[RolloutGroup]:
    """One group per task, each with a greedy rollout if the algorithm needs one as its baseline.
    ``place`` in the run decides their seed."""
    collect = parts.collector.collect
    sampling = parts.sampling
    plan = parts.plan
    size = plan.sampling.n
    seed = derive_seed(plan.said.train.seed, plan.sampling.seed, *place)
    if "greedy_rollout" not in parts.algorithm.needs:
        return await collect(tasks, sampling, size, seed)
    greedy = replace(sampling, temperature=0.0)
    groups, baselines = await all_or_error(
        [collect(tasks, sampling, size, seed), collect(tasks, greedy, 1, seed)]
    )
    return [replace(g, greedy=b.rollouts[0]) for g, b in zip(groups, baselines, strict=True)]


def select_learnable(parts: RLParts, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups that can be learned from: any greedy rollout worked, and the filter, if on, finds
    contrast.

    The curriculum learns how many rollouts are right, and rests the tasks of groups that the filter
    rejects.
    """
    dynamic_filter = parts.algorithm.dynamic_filter
    parts.tasks.learn(groups)
    comparable = [g for g in groups if g.greedy is None or g.greedy.reward is not None]
    if not dynamic_filter:
        return comparable
    kept, rejected = filtering.split(dynamic_filter, comparable, parts.rewards.weights)
    parts.tasks.rest(rejected)
    return kept


def rollout_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Counts and lengths of a step's rollouts."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {"rollouts": 0.0}
    sequences = [len(record.token_ids) for r in rollouts for record in r.records]
    return {
        "rollouts": float(len(rollouts)),
        "tokens": float(sum(r.num_sampled for r in rollouts)),
        **length_metrics(rollouts),
        "longest_sequence": float(max(sequences)),
        "groups_equal": float(np.mean([len({r.reward for r in g.usable}) < 2 for g in groups])),
    }


def length_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """How long the answers of some rollouts are; empty without any."""
    if not rollouts:
        return {}
    lengths = np.array([r.num_sampled for r in rollouts])
    return {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_min": float(lengths.min()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
    }


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> Metrics:
    """How many versions before ``version`` the tokens of these groups were sampled."""
    records = [record for g in groups for r in g.rollouts for record in r.records]
    ages = [version - v for record in records for v in compress(record.versions, record.sampled)]
    if not ages:
        return {}
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))}
