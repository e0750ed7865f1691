"""Evaluates the policy on held-out tasks: reward of greedy answers, and pass@k of several
samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from tunesmith.config.schema import EvalSection
from tunesmith.run.loop.collect import Collector
from tunesmith.types import Rollout, RolloutGroup, Sampling, Task

if TYPE_CHECKING:
    from tunesmith.run.trainers.base import Metrics

ROUNDING = 1e-9
"""Tolerance, because weights and rewards are summed in different orders."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What to measure: greedy answers, and with ``eval.samples > 1`` pass@k for each ``k`` of
    ``eval.pass_at``.

    A rollout passes when its reward reaches the sum of the positive ``weights`` of the rewards that
    apply to it. An environment's reward has a weight of 1.
    """

    tasks: Sequence[Task]
    sampling: Sampling
    section: EvalSection
    weights: Mapping[str, float]
    seed: int
    pass_at: tuple[int, ...] | None = None


async def evaluate(
    collector: Collector, plan: EvaluationPlan
) -> tuple[Metrics, list[RolloutGroup]]:
    """Metrics named ``eval/...``, and the greedy groups they come from, in the order of the
    tasks."""
    sampling = replace(plan.sampling, temperature=0.0)
    greedy = await collector.collect(plan.tasks, sampling, 1, plan.seed)
    metrics = _greedy_metrics(greedy, plan.weights)
    played = greedy
    samples = plan.section.samples
    if samples > 1:
        sampling = replace(plan.sampling, temperature=plan.section.temperature)
        groups = await collector.collect(plan.tasks, sampling, samples, plan.seed)
        # A failed rollout counts as not passed: leaving it out would overrate the policy.
        passed = [sum(passes(r, plan.weights) for r in g.usable) for g in groups]
        for k in plan.pass_at or (samples,):
            metrics[f"eval/pass@{k}"] = float(np.mean([pass_at_k(samples, n, k) for n in passed]))
        played = [*greedy, *groups]
    total = sum(len(group.rollouts) for group in played)
    metrics["eval/failed"] = 1 - sum(len(group.usable) for group in played) / total
    return metrics, greedy


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of ``k`` samples passes, from ``correct`` of
    ``n``.

    Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def passes(rollout: Rollout, weights: Mapping[str, float]) -> bool:
    applied = [name for name, value in rollout.rewards.items() if value is not None]
    full = sum(max(0.0, weights.get(name, 1.0)) for name in applied) if applied else 1.0
    return rollout.reward is not None and rollout.reward >= full - ROUNDING


def _greedy_metrics(groups: Sequence[RolloutGroup], weights: Mapping[str, float]) -> Metrics:
    rollouts = [r for g in groups for r in g.rollouts]
    usable = [r for g in groups for r in g.usable]
    metrics = {
        "eval/accuracy": sum(passes(r, weights) for r in usable) / len(rollouts),
        "eval/length": float(np.mean([r.num_sampled for r in rollouts])),
    }
    if usable:
        metrics["eval/reward"] = float(np.mean([r.reward for r in usable if r.reward is not None]))
    for name in dict.fromkeys(name for r in usable for name in r.rewards):
        values = [r.rewards.get(name) for r in usable]
        applied = [value for value in values if value is not None]
        if applied:
            metrics[f"eval/reward/{name}"] = float(np.mean(applied))
    answered = [r.metrics["answered"] for r in usable if "answered" in r.metrics]
    if answered:
        metrics["eval/answered"] = float(np.mean(answered))
    return metrics
