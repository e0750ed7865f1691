"""The numbers that the rules use, by dotted name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import StatisticsError, correlation, fmean, median
from typing import Any

from tunesmith.doctor.record import Metrics, RunRecord
from tunesmith.monitor.metrics import numbers
from tunesmith.monitor.timeline import OUTSIDE_STEPS

LEAST_WINDOW = 3
SHARE = 5
"""The first and the last ``1 / SHARE`` of the steps are compared."""
BEFORE = 10
"""Number of preceding steps that a jump is compared with."""
JUMP = 20
LEAST_PAIRS = 32
"""Minimum number of rollouts for a meaningful correlation of length and reward."""


def signs(record: RunRecord) -> dict[str, Any]:
    """Settings by key, statistics of each metric, and values derived from both.

    A metric has ``first`` and ``last`` (means over a fifth of the steps; ``last_steps`` names the last ones), ``rise``
    (last - first), ``times`` (last / first), ``mean``, ``median``, ``max``, ``min``, ``sum``, ``count``, ``max_step``
    and ``min_step``.
    """
    values = {key: value for key, value in record.settings.items() if value is not None}
    values |= statistics(record.steps, None) | statistics(record.evaluations, 1)
    seconds = values.get("seconds.sum") or 0.0
    phases = [name for name in values if name.startswith("seconds/") and name.endswith(".sum")]
    values |= {name.removesuffix("sum") + "share": values[name] / seconds for name in phases if seconds}
    values |= _of_run(record) | _of_rewards(record) | _of_evaluations(record, values)
    values |= _of_change(record, values) | _of_updates(record, values) | _of_time(record, values)
    return values | _jump(record.steps, "grad_norm") | _jump(record.steps, "loss")


def _of_change(record: RunRecord, values: Mapping[str, Any]) -> dict[str, Any]:
    """The reward's rise, in standard deviations over rollouts and in standard errors, and signs of any change."""
    found: dict[str, Any] = {}
    if (spread := values.get("reward/std.first")) and "reward.rise" in values:
        found["reward.rise_in_stds"] = values["reward.rise"] / spread
        compared = _window(len(record.steps)) * values.get("rollouts.mean", 0.0)
        found["reward.rise_in_errors"] = abs(found["reward.rise_in_stds"]) * math.sqrt(compared / 2)
    if first := values.get("entropy.first"):
        found["entropy.change"] = abs(values["entropy.rise"] / first)
    full = record.facts and record.facts.full_reward
    for end in ("first", "last"):  # if answers are not right or wrong, the share of the full reward
        if (share := values.get(f"correct.{end}")) is not None:
            found[f"right.{end}"] = share
        elif full and f"reward.{end}" in values:
            found[f"right.{end}"] = values[f"reward.{end}"] / full
    if record.facts is not None:
        found["reach"] = record.facts.reach
    if "eval/accuracy.first" in values and "right.first" in found:
        found["greedy_gap"] = values["eval/accuracy.first"] - found["right.first"]
    return found


def _of_updates(record: RunRecord, values: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer steps: their number and size, and the shares that were dropped or clipped."""
    found: dict[str, Any] = {}
    if taken := values.get("optimizer_steps.sum"):
        found["skipped_share"] = values.get("skipped_steps.sum", 0.0) / taken
        planned = taken / len(record.steps) * _number(record, "train.steps")
        if planned > 1:
            found["warmup_share"] = _number(record, "train.warmup_steps") / planned
        passes = _number(record, "train.passes_per_batch") or 1
        found["steps_per_batch"] = values["optimizer_steps.mean"] / passes
        found["quarter_batch"] = int(values.get("rollouts.mean", 0.0)) // 4
        found["on_policy"] = values["optimizer_steps.max"] == 1 and _sampled_as_scored(record)
    if clipped := [values[name] for name in ("clip_low.mean", "clip_high.mean") if name in values]:
        found["clipped"] = sum(clipped)
    if (norm := values.get("grad_norm.median")) and (most := _number(record, "train.max_grad_norm")):
        found["clipped_by"] = norm / most
    if retried := [line["step"] for line in record.steps if line.get("memory_retries")]:
        found["memory_retries.last_step"] = retried[-1]
    return found


def _sampled_as_scored(record: RunRecord) -> bool:
    """Whether the sampler's log-probabilities are those of the trained policy over all tokens."""
    settings = record.settings
    uncut = settings.get("rollout.top_p") in (None, 1.0) and not _number(record, "rollout.min_p")
    uncut = uncut and settings.get("rollout.top_k") in (None, 0, -1)
    return uncut and not settings.get("algorithm.decoupled") and not _number(record, "rollout.max_staleness")


def _of_time(record: RunRecord, values: Mapping[str, Any]) -> dict[str, Any]:
    """Waiting times, and settings derived from them."""
    found: dict[str, Any] = {}
    counted = values.get("seconds.sum", 0.0) - sum(values.get(f"seconds/{name}.sum", 0.0) for name in OUTSIDE_STEPS)
    for name in ("reward", "environment"):
        if (share := values.get(f"waiting/{name}.mean")) is not None:
            found[f"waited/{name}"] = share * counted
    if mean := values.get("completion_tokens.mean"):
        found["straggling"] = values.get("completion_tokens_max.mean", mean) / mean
    if (running := _number(record, "system.max_running")) > 1:
        found["half_running"] = int(running) // 2
    if bound := _number(record, "rollout.max_staleness"):
        found["staleness_share"] = values.get("staleness/mean.mean", 0.0) / bound
    if record.facts is not None:
        found["fitting_threads"] = max(1, int(_number(record, "system.threads") / record.facts.threads_per_core))
    return found


def _number(record: RunRecord, key: str) -> float:
    """A setting; 0 if it is None or not a number, because another version or a person may have written it."""
    value = record.settings.get(key)
    return value if isinstance(value, int | float) and -1e300 < value < 1e300 else 0


def _window(count: int) -> int:
    return min(count, max(LEAST_WINDOW, math.ceil(count / SHARE)))


def statistics(lines: Sequence[Metrics], width: int | None) -> dict[str, float]:
    """See ``signs``; ``first`` and ``last`` are means over ``width`` lines (None: a fifth of them)."""
    columns: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time"):
                columns[name].append((value, line["step"]))
    values: dict[str, float] = {}
    for name, column in columns.items():
        numbers = [value for value, _ in column]
        part = width or _window(len(numbers))
        first, last = _mean(numbers[:part]), _mean(numbers[-part:])
        found = {
            "first": first,
            "last": last,
            "rise": last - first,
            "mean": _mean(numbers),
            "median": median(numbers),
            "max": max(numbers),
            "min": min(numbers),
            "sum": sum(numbers),
            "count": len(numbers),
            "max_step": max(column)[1],
            "min_step": min(column)[1],
        }
        if first > 0:
            found["times"] = last / first
        values |= {f"{name}.{key}": value for key, value in found.items()}
    return values


def _mean(numbers: Sequence[float]) -> float:
    """Also of infinities of both signs (NaN), which ``fmean`` refuses."""
    return sum(numbers) / len(numbers)


def _jump(lines: Sequence[Metrics], name: str) -> dict[str, float]:
    """The largest ratio of a value to the median of the ``BEFORE`` preceding ones; skips a run's first steps.

    ``jumps`` counts the steps with a ratio above ``JUMP``.
    """
    column = [(line[name], line["step"]) for line in lines if line.get(name, 0.0) > 0]
    found, jumps = dict[str, float](), 0
    for index in range(BEFORE, len(column)):
        usual = median(value for value, _ in column[index - BEFORE : index])
        value, step = column[index]
        jumps += value / usual > JUMP
        if value / usual > found.get(f"{name}.jump", 0.0):
            found = {f"{name}.jump": value / usual, f"{name}.jump_step": step, f"{name}.jump_from": usual}
            found[f"{name}.jump_to"] = value
    return found | {f"{name}.jumps": jumps, f"{name}.jumps_share": jumps / max(1, len(column))}


def _of_run(record: RunRecord) -> dict[str, Any]:
    last, planned = int(record.steps[-1]["step"]), _number(record, "train.steps")
    values: dict[str, Any] = {
        "rl": "rollout.group_size" in record.settings,
        "steps": len(record.steps),
        "first_step": int(record.steps[0]["step"]),
        "last_step": last,
        "last_steps": f"{int(record.steps[-_window(len(record.steps))]['step'])}-{last}",
        "device_is_gpu": str(record.settings.get("system.device")).startswith("cuda"),
        "stopped": last < planned and not record.running,
    }
    if record.facts is not None:
        names = ("train_size", "repeated", "seen", "too_long", "bad", "source_share", "threads_per_core")
        values |= {f"data.{name}": getattr(record.facts, name) for name in names}
    return values


def _of_rewards(record: RunRecord) -> dict[str, Any]:
    """Rewards that never vary, kinds of failures, and the correlation of reward and length."""
    spreads: defaultdict[str, float] = defaultdict(float)
    sizes: defaultdict[str, float] = defaultdict(float)
    failures: defaultdict[str, float] = defaultdict(float)
    for line in record.steps:
        for name, value in line.items():
            group, _, rest = name.partition("/")
            if group == "reward" and rest.endswith("/std"):
                spreads[rest.removesuffix("/std")] += value
            if group == "reward" and rest.endswith("/mean"):
                sizes[rest.removesuffix("/mean")] += abs(value)
            if group == "rollouts" and rest not in ("", "failed"):
                failures[rest] += value
    constant = [name for name, spread in spreads.items() if spread == 0 and len(spreads) > 1]
    values: dict[str, Any] = {
        "rewards_at_zero": [name for name in constant if not sizes[name]] or None,
        "rewards_saturated": [name for name in constant if sizes[name]] or None,
        "failures": sorted((name for name in failures if failures[name] > 0), key=lambda name: -failures[name]),
    }
    together = _length_and_reward(record.rollouts)
    return values if together is None else values | {"length_correlation": together}


def _length_and_reward(rollouts: Iterable[Mapping[str, Any]]) -> float | None:
    """Correlation of length and reward within groups; None if there is too little to tell."""
    groups: defaultdict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for row in rollouts:
        found = numbers(row)
        if found.keys() >= {"tokens", "reward", "step", "group"}:
            groups[found["step"], found["group"]].append((found["tokens"], found["reward"]))
    lengths: list[float] = []
    rewards: list[float] = []
    for pairs in groups.values():
        length, reward = (fmean(values) for values in zip(*pairs, strict=True))
        lengths += [pair[0] - length for pair in pairs]
        rewards += [pair[1] - reward for pair in pairs]
    try:
        return correlation(lengths, rewards) if len(lengths) >= LEAST_PAIRS else None
    except StatisticsError:  # all lengths or all rewards are equal
        return None


def _of_evaluations(record: RunRecord, values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of held-out metrics. ``eval_error``: two standard errors of a difference of accuracies."""
    size, share = record.facts and record.facts.eval_size, values.get("eval/accuracy.mean")
    found: dict[str, Any] = {}
    judged = values.get("eval/accuracy.last", values.get("accuracy.last"))
    if judged is not None:
        found["judged.last"] = judged
    if size and share is not None:
        found |= {"eval_size": size, "eval_error": 2 * math.sqrt(2 * max(share * (1 - share), 1 / size) / size)}
    if spread := values.get("reward/std.first"):
        rewards = [line["eval/reward"] for line in record.evaluations if "eval/reward" in line]
        # A single low evaluation is often noise: the better of the last two counts.
        found["eval_fall"] = (max(rewards, default=0.0) - max(rewards[-2:], default=0.0)) / spread
        found["eval_fall_in_errors"] = found["eval_fall"] * math.sqrt((size or 0) / 2)
    if least := values.get("eval/loss.min"):
        found["eval_loss_rise"] = values["eval/loss.last"] / least - 1
        found["eval_loss_rise_by"] = values["eval/loss.last"] - least
        if values["eval/loss.min_step"]:
            found["best_loss_step"] = values["eval/loss.min_step"]
    return found
