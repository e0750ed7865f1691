"""Every metric there is: name, unit, how a step's value is formed, meaning, and other tools' names for it.

``docs/observability.md`` is written from this list, and sinks get the other names from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Form = Literal["mean", "sum", "max", "min", "std", "last", "rate"]
"""How the value of a step is formed; ``last`` is the state at its end."""


@dataclass(frozen=True, slots=True)
class Metric:
    """``<word>`` in ``name`` stands for any word; an alias may use the same one."""

    name: str
    unit: str
    form: Form
    meaning: str
    aliases: tuple[str, ...] = ()


CATALOGUE: Mapping[str, tuple[Metric, ...]] = {
    "time": (
        Metric("step", "", "last", "Number of the step, from 1."),
        Metric("time", "s", "last", "When the line was written, since 1970."),
        Metric("epoch", "", "last", "Whole passes over the data so far.", ("train/epoch",)),
        Metric("total_tokens", "tokens", "sum", "All `tokens` of the run so far.", ("num_tokens",)),
        Metric("seconds", "s", "sum", "Wall time since the last step's line.", ("step_time",)),
        Metric(
            "seconds/<phase>",
            "s",
            "sum",
            "Its parts, which add up to `seconds`: `sync` (weights to the engines), `rollout` (waiting for rollouts "
            "and their rewards), `train`, `eval`, `checkpoint`, `setup`, and `other`.",
        ),
        Metric(
            "tokens_per_second", "1/s", "rate", "`tokens` by the step's time without `setup`, `eval` and `checkpoint`."
        ),
        Metric(
            "attainable_seconds",
            "s",
            "sum",
            "Least time the same work could have taken on this hardware. Left out, with `limit_share`, where the "
            "sampler's least time is not known: with vLLM, servers, and local engines on Ray or on GPUs of their own.",
        ),
        Metric(
            "limit_share",
            "share",
            "rate",
            "`attainable_seconds` of the step's time without `setup`, `eval` and `checkpoint`.",
        ),
        Metric("idle/trainer", "share", "mean", "Of the same time: how much of it the trainer did not train."),
        Metric(
            "idle/engine",
            "share",
            "mean",
            "How much of it an engine had no request in flight; the mean of all engines.",
        ),
        Metric("idle/engine/<number>", "share", "mean", "The same of each, where there are several."),
        Metric(
            "engine_tokens_per_second",
            "1/s",
            "rate",
            "Tokens sampled by second in which an engine had a request.",
        ),
        Metric("engine_tokens_per_second/<number>", "1/s", "rate", "The same of each, where there are several."),
        Metric(
            "queue/mean",
            "groups",
            "mean",
            "Finished groups that wait to be trained on, over time. With `rollout.max_staleness` above 0.",
        ),
        Metric("queue/max", "groups", "max", "The same, at most."),
        Metric("playing/mean", "groups", "mean", "Groups that are being sampled or rewarded, over time."),
        Metric("playing/max", "groups", "max", "The same, at most."),
        Metric(
            "staleness/mean",
            "versions",
            "mean",
            "By how many versions the policy that sampled a token is older than the one trained: over all tokens of "
            "the batch.",
        ),
        Metric("staleness/max", "versions", "max", "The same, at most."),
        Metric("sampled_tokens", "tokens", "sum", "Sampled by the engines, evaluations left out."),
        Metric(
            "reused_prompt_tokens",
            "tokens",
            "sum",
            "Of prompts, not computed because the engine had them in its cache.",
        ),
        Metric("prefix_hit_share", "share", "rate", "`reused_prompt_tokens` of all tokens of prompts."),
        Metric("draft_acceptance", "share", "rate", "Guessed tokens that were kept, with `system.speculative`."),
        Metric("preemptions", "requests", "sum", "Interrupted and begun again for want of KV memory."),
        Metric("kv_peak", "bytes", "max", "Most keys and values that the engines have held at once so far."),
        Metric("kv_used", "share", "max", "`kv_peak` of the memory for keys and values, `system.kv_memory`."),
        Metric(
            "samples_per_second",
            "1/s",
            "rate",
            "`rollouts`, or in supervised training `samples`, by the step's time without `setup`, `eval` and "
            "`checkpoint`.",
            ("train/samples_per_second",),
        ),
        Metric("memory/host_peak", "bytes", "max", "Resident memory of the trainer's process since it began."),
        Metric(
            "memory/device_peak",
            "bytes",
            "max",
            "GPU memory that torch held in the trainer's process during the step.",
            ("system/gpu_memory_allocated",),
        ),
        Metric(
            "canary",
            "nats",
            "max",
            "The greatest difference between an engine's log-probability and the trainer's, after a sync "
            "([the canary](weights.md#the-canary)).",
        ),
    ),
    "rollouts": (
        Metric("rollouts", "rollouts", "sum", "How many."),
        Metric("samples", "samples", "sum", "In supervised training: of the batch."),
        Metric("tokens", "tokens", "sum", "That the policy wrote in them. In supervised training: of the batch."),
        Metric("completion_tokens", "tokens", "mean", "Written in a rollout.", ("completions/mean_length",)),
        Metric("completion_tokens_min", "tokens", "min", "The same, at least.", ("completions/min_length",)),
        Metric("completion_tokens_max", "tokens", "max", "The same, at most.", ("completions/max_length",)),
        Metric("longest_sequence", "tokens", "max", "Of the longest sequence, its prompt included."),
        Metric(
            "truncated", "share", "mean", "Rollouts that ended at their length limit.", ("completions/clipped_ratio",)
        ),
        Metric(
            "groups_equal",
            "share",
            "mean",
            "Groups without contrast: all rewards are the same.",
            ("frac_reward_zero_std",),
        ),
        Metric("groups_kept", "share", "rate", "Groups that could be learned from."),
        Metric("tasks_resting", "tasks", "last", "Left out for now (`algorithm.rest_epochs`)."),
        Metric("rollouts/failed", "share", "mean", "Rollouts that failed, in all."),
        Metric("rollouts/<status>", "share", "mean", "The same, by how they failed."),
        Metric("reward", "", "mean", "The total reward of a rollout.", ("train/reward",)),
        Metric("reward/std", "", "std", "Its deviation.", ("reward_std",)),
        Metric("reward/<name>/mean", "", "mean", "Of one reward.", ("rewards/<name>/mean",)),
        Metric("reward/<name>/std", "", "std", "Its deviation.", ("rewards/<name>/std",)),
        Metric("reward/<name>/applied", "share", "mean", "Rollouts for which it gave a number."),
        Metric("answered", "share", "mean", "Rollouts with an answer, where a built-in reward looks for one."),
        Metric("correct", "share", "mean", "Rollouts with the right one."),
        Metric("correct_of_answered", "share", "rate", "Right ones of those with an answer."),
        Metric(
            "reward/abandoned_threads",
            "threads",
            "last",
            "Reward functions that ran into their time limit and still run.",
        ),
        Metric("logged/<name>", "", "mean", "What rewards and environments logged."),
    ),
    "learning": (
        Metric("loss", "", "mean", "What was minimised.", ("train/loss",)),
        Metric("policy_loss", "", "mean", "The policy's part of it."),
        Metric("nll", "nats", "mean", "Negative log-probability of a loss token, in supervised training."),
        Metric("policy_kl", "nats", "mean", "Per token, from the policy before the step's first optimizer step."),
        Metric("ref_kl", "nats", "mean", "Per token, from the reference.", ("kl",)),
        Metric("teacher_kl", "nats", "mean", "Per token, from the teacher."),
        Metric("kl_coef", "", "last", "The adaptive coefficient."),
        Metric(
            "entropy",
            "nats",
            "mean",
            "Of the policy, per token. Estimated as the mean of −log π over the sampled tokens, which costs nothing; "
            "exact where `algorithm.entropy_coef` needs the whole distribution.",
        ),
        Metric("ratio", "", "mean", "New by old probability."),
        Metric("ratio_over_2", "share", "mean", "Tokens for which that is above 2."),
        Metric("clip_low", "share", "mean", "Tokens clipped from below.", ("clip_ratio/low_mean",)),
        Metric("clip_high", "share", "mean", "Tokens clipped from above.", ("clip_ratio/high_mean",)),
        Metric("grad_norm", "", "mean", "Before clipping.", ("train/grad_norm",)),
        Metric("lr", "", "mean", "Learning rate.", ("train/learning_rate", "learning_rate")),
        Metric("optimizer_steps", "steps", "sum", "Taken in this step."),
        Metric("skipped_steps", "steps", "sum", "Of them, dropped because the gradient was not finite."),
        Metric("nonfinite_tokens", "tokens", "mean", "Left out because their log-probability was not finite."),
        Metric("microbatches", "", "sum", "Forward and backward passes."),
        Metric("trained_tokens", "tokens", "sum", "In them; a prompt shared by a group counts once."),
    ),
    "critic": (
        Metric("returns", "", "mean", "What the critic is to predict."),
        Metric("value", "", "mean", "What it predicts."),
        Metric("value_loss", "", "mean", "Its loss."),
        Metric("value_error", "", "mean", "Mean squared error."),
        Metric("value_explained", "", "mean", "1 is perfect, 0 a constant."),
        Metric("value_clip_low", "share", "mean", "Values clipped from below."),
        Metric("value_clip_high", "share", "mean", "Values clipped from above."),
        Metric("critic/<metric>", "", "mean", "A number of learning, of the critic's own optimizer steps."),
    ),
    "preferences": (
        Metric("rewards/chosen", "", "mean", "Reward of the better answers; of the good ones in KTO."),
        Metric("rewards/rejected", "", "mean", "Reward of the worse answers; of the bad ones in KTO."),
        Metric("rewards/mean", "", "mean", "Of all answers, in a reward model."),
        Metric("rewards/std", "", "std", "Their deviation."),
        Metric("margin", "", "mean", "`rewards/chosen` less `rewards/rejected`.", ("rewards/margins",)),
        Metric("accuracy", "share", "mean", "Judged rightly; a tie counts half.", ("rewards/accuracies",)),
        Metric("kl", "nats", "mean", "Of whole answers, from the reference: of the mismatched pairs in KTO."),
        Metric("nonfinite_<things>", "", "mean", "Left out because a number of theirs was not finite."),
    ),
    "evaluation": (
        Metric("eval/accuracy", "share", "mean", "Greedy answers with the full reward; in preferences as above."),
        Metric("eval/reward", "", "mean", "Total reward of a greedy answer."),
        Metric("eval/reward/<name>", "", "mean", "Of one reward."),
        Metric("eval/pass@<k>", "share", "mean", "At least one of `k` samples has the full reward."),
        Metric("eval/length", "tokens", "mean", "Of a greedy answer."),
        Metric("eval/answered", "share", "mean", "Greedy answers that hold an answer."),
        Metric("eval/failed", "share", "mean", "Rollouts that failed."),
        Metric("eval/loss", "", "mean", "What is minimised, over the held-out set."),
        Metric("eval/<metric>", "", "mean", "A number of preferences, over the held-out set."),
    ),
}
"""By kind; a kind is a table in the documents."""


def find(name: str) -> Metric | None:
    """The metric of a name, as it stands in a run's ``metrics.jsonl``."""
    return next((metric for metric in _ordered() if re.fullmatch(_pattern(metric.name), name)), None)


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and each again under other tools' names for it; a metric's own name comes first."""
    found = {alias: value for name, value in metrics.items() for alias in aliases(name)}
    return {**found, **metrics}


@cache
def aliases(name: str) -> tuple[str, ...]:
    """Other tools' names for one metric: ``reward/std`` is ``reward_std`` elsewhere."""
    if (metric := find(name)) is None:
        return ()
    found = re.fullmatch(_pattern(metric.name), name)
    words = found.groupdict() if found else {}
    return tuple(re.sub(r"<(\w+)>", lambda place: words[place[1]], alias) for alias in metric.aliases)


@cache
def _ordered() -> tuple[Metric, ...]:
    """Exact names first, so that ``rollouts/failed`` is not taken for a status."""
    every = [metric for kind in CATALOGUE.values() for metric in kind]
    return tuple(sorted(every, key=lambda metric: metric.name.count("<")))


@cache
def _pattern(name: str) -> str:
    """``reward/<name>/std`` as an expression. A word may hold anything: reward functions are named by people."""
    return re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.sub(r"[.@+*?()\[\]]", r"\\\g<0>", name))
