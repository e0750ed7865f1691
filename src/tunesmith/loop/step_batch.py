"""A step's groups of rollouts: played, rewarded, and kept where something can be learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from tunesmith.algorithms.filtering import filter_groups
from tunesmith.algorithms.presets import algorithm_needs
from tunesmith.engines.base import EngineStats
from tunesmith.loop.collect import all_or_error
from tunesmith.loop.learner import Metrics
from tunesmith.loop.parts import RLParts
from tunesmith.loop.seeds import derive_seed
from tunesmith.loop.session import Session
from tunesmith.rewards.metrics import check_failed
from tunesmith.rewards.trainer_state import TrainerState
from tunesmith.types import RolloutGroup, Task


async def collect_step_batch(parts: RLParts, session: Session) -> tuple[list[RolloutGroup], Metrics]:
    """The step's groups, rewarded.

    With dynamic filtering (DAPO, arXiv:2503.14476, section 3.2) groups without contrast are replaced by new
    tasks, until the batch is full or as many were tried as the data has; ``rollout.oversample`` tries more at
    once, so that fewer rounds are needed, and what is left over is not trained on.
    """
    config = parts.config
    wanted = config.rollout.prompts_per_step
    tell_rewards(parts, session)
    counted = parts.engine.stats()
    kept: list[RolloutGroup] = []
    tried: list[RolloutGroup] = []
    while len(kept) < wanted and len(tried) < max(wanted, len(parts.tasks)):
        tasks = parts.tasks.next_batch(ceil((wanted - len(kept)) * config.rollout.oversample))
        seed = derive_seed(config.train.seed, config.rollout.seed, session.step, len(tried))
        groups = await play(parts, tasks, seed)
        check_failures(parts, groups)
        tried += groups
        kept += informative(parts, groups)
    parts.tasks.settle([g.task for g in tried])
    return kept[:wanted], step_metrics(
        parts, tried, kept[:wanted], len(kept) / len(tried), parts.engine.stats().since(counted)
    )


def tell_rewards(parts: RLParts, session: Session) -> None:
    """Where the run stands, for reward functions that ask."""
    best, config = session.best, parts.config
    parts.rewards.state = TrainerState(
        global_step=session.step,
        max_steps=session.total_steps,
        epoch=float(parts.tasks.epoch),
        logging_steps=config.monitor.every,
        eval_steps=config.eval.every,
        save_steps=config.checkpoint.every if isinstance(config.checkpoint.every, int) else None,
        best_metric=best.value,
        best_global_step=best.step,
        best_model_checkpoint=str(session.checkpoints.path(best.step)) if best.step else None,
        metrics_file=session.metrics.path,
    )


def check_failures(parts: RLParts, groups: Sequence[RolloutGroup]) -> None:
    """Stop the run where too many rollouts failed, greedy ones among them."""
    played = [r for g in groups for r in (*g.rollouts, *([g.greedy] if g.greedy else ()))]
    check_failed(played, parts.config.reward.max_failed_share)


def step_metrics(
    parts: RLParts,
    tried: Sequence[RolloutGroup],
    batch: Sequence[RolloutGroup],
    groups_kept: float,
    stats: EngineStats,
) -> Metrics:
    """Of the groups that were played for a step, of those it trains on, and of the sampler meanwhile."""
    prompts = stats.reused_prompt_tokens + stats.prefilled_tokens
    return {
        **rollout_metrics(tried),
        **parts.rewards.metrics([r for g in tried for r in g.rollouts]),
        "epoch": float(parts.tasks.epoch),
        "groups_kept": groups_kept,
        **({"tasks_resting": float(parts.tasks.resting)} if parts.config.algorithm.rest_epochs else {}),
        "sampled_tokens": float(stats.sampled_tokens),
        "reused_prompt_tokens": float(stats.reused_prompt_tokens),
        **({"prefix_hit_share": stats.reused_prompt_tokens / prompts} if prompts else {}),
        **staleness_metrics(batch, parts.engine.version),
        "preemptions": float(stats.preemptions),
        "kv_peak": float(stats.peak_kv_bytes),
        **({"kv_used": stats.peak_kv_bytes / stats.kv_budget_bytes} if stats.kv_budget_bytes else {}),
        # Where the sampler's limits are not known, neither is the step's.
        **({"attainable_seconds": stats.attainable_seconds} if stats.attainable_seconds or not prompts else {}),
        **({"draft_acceptance": stats.accepted_tokens / stats.drafted_tokens} if stats.drafted_tokens else {}),
    }


async def play(parts: RLParts, tasks: Sequence[Task], seed: int) -> list[RolloutGroup]:
    """A group per task; beside it a greedy rollout, played and rewarded in the same way, where it is compared with."""
    collect, sampling, size = parts.collector.collect, parts.sampling, parts.config.rollout.group_size
    if "greedy_rollout" not in algorithm_needs(parts.config.algorithm):
        return await collect(tasks, sampling, size, seed)
    greedy = replace(sampling, temperature=0.0)
    groups, baselines = await all_or_error([collect(tasks, sampling, size, seed), collect(tasks, greedy, 1, seed)])
    return [replace(g, greedy=b.rollouts[0]) for g, b in zip(groups, baselines, strict=True)]


def informative(parts: RLParts, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Without those whose greedy rollout failed, and with a filter those without contrast."""
    algorithm = parts.config.algorithm
    comparable = [g for g in groups if g.greedy is None or g.greedy.reward is not None]
    if not algorithm.dynamic_filter:
        return comparable
    kept, rejected = filter_groups(comparable, algorithm.filter_low, algorithm.filter_high, parts.rewards.weights)
    parts.tasks.rest(rejected)
    return kept


def rollout_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """What a step's rollouts look like, beside their rewards."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {"rollouts": 0.0}
    lengths = np.array([r.num_sampled for r in rollouts])
    return {
        "rollouts": float(len(rollouts)),
        "tokens": float(lengths.sum()),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_min": float(lengths.min()),
        "completion_tokens_max": float(lengths.max()),
        "longest_sequence": float(max(len(record.token_ids) for r in rollouts for record in r.records)),
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "groups_equal": float(np.mean([len({r.reward for r in g.usable}) < 2 for g in groups])),
    }


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> Metrics:
    """By how many versions the policy that sampled a token is older than the trainer's ``version``, over all tokens."""
    records = [record for g in groups for r in g.rollouts for record in r.records]
    ages = [version - v for record in records for v, ours in zip(record.versions, record.sampled, strict=True) if ours]
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))} if ages else {}
