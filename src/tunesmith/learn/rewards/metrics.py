"""Metrics of rollouts and their rewards, and the limit on the share of failed rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import nan
from statistics import fmean, pstdev

from tunesmith.errors import RewardError
from tunesmith.types import Rollout, Status


def check_failed(rollouts: Sequence[Rollout], max_share: float) -> None:
    """Stop the run (``RewardError``) when more than ``max_share`` of the rollouts failed."""
    failed = [r for r in rollouts if r.status is not Status.OK]
    if not failed or len(failed) <= max_share * len(rollouts):
        return
    shown = next((r for r in failed if r.status is not Status.NOT_TRIED), failed[0])
    kinds = Counter(r.status.value for r in failed)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    raise RewardError(
        f"{len(failed)} of {len(rollouts)} rollouts failed ({counts}): "
        f"{len(failed) / len(rollouts):.0%}, above reward.max_failed_share = {max_share:.0%}. "
        f"The first, of task {shown.task.id}:\n{shown.error}"
    )


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean and standard deviation of the total and of each reward, shares of failures, means of
    logged numbers.

    ``applied`` is the share of rollouts that a reward applies to. ``answered`` and ``correct`` are
    shares of the rollouts they were logged for; ``correct_of_answered`` is the accuracy among
    rollouts with an answer.
    """
    if not rollouts:
        return {}
    failed = Counter(r.status for r in rollouts if r.status is not Status.OK)
    metrics = {"rollouts/failed": failed.total() / len(rollouts)}
    metrics |= {f"rollouts/{status.value}": n / len(rollouts) for status, n in failed.items()}
    usable = [r for r in rollouts if r.status is Status.OK]
    totals = [r.reward for r in usable if r.reward is not None]
    if totals:
        metrics |= {"reward": fmean(totals), "reward/std": pstdev(totals)}
    for name in dict.fromkeys(name for r in usable for name in r.rewards):
        own = [r.rewards.get(name) for r in usable]
        values = [value for value in own if value is not None]
        metrics[f"reward/{name}/applied"] = len(values) / len(usable)
        if values:
            metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": pstdev(values)}
    for name in dict.fromkeys(name for r in usable for name in r.metrics):
        key = name if name in ("answered", "correct") else f"logged/{name}"
        metrics[key] = mean([r.metrics[name] for r in usable if name in r.metrics])
    answered = [r for r in usable if r.metrics.get("answered", 0.0) > 0]
    if answered:
        right = [r.metrics["correct"] for r in answered if "correct" in r.metrics]
        metrics["correct_of_answered"] = mean(right) if right else 0.0
    return metrics | environment_metrics(rollouts)


def environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The share, the mean reward and the share of failures of each environment, where there are
    several."""
    by_name: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_name.setdefault(rollout.task.environment, []).append(rollout)
    metrics: dict[str, float] = {}
    for name, played in by_name.items() if len(by_name) > 1 else ():
        usable = [r for r in played if r.status is Status.OK]
        totals = [r.reward for r in usable if r.reward is not None]
        metrics[f"environment/{name}/share"] = len(played) / len(rollouts)
        metrics[f"environment/{name}/failed"] = 1 - len(usable) / len(played)
        if totals:
            metrics[f"environment/{name}/reward"] = fmean(totals)
    return metrics


def mean(values: Sequence[float]) -> float:
    """The mean of logged numbers; NaN where their sum overflows or has infinities of both signs."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):
        return nan
