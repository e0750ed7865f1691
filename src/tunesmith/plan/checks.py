"""Settings at odds with each other: what can be refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from tunesmith.algorithms.presets import algorithm_needs, resolve_algorithm
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import ConfigError


def check(config: RunConfig) -> None:
    """Refuse a configuration that contradicts itself, with all contradictions listed.

    Raises:
        ConfigError: naming the keys, why they do not go together, and what to change.
    """
    problems = [*_check_train(config), *_check_eval(config)]
    if isinstance(config, RLConfig):
        problems += [*_check_rl(config), *_check_algorithm(config)]
    if isinstance(config, SFTConfig):
        problems += _check_sft(config)
    if config.checkpoint.resume is True and config.run_dir is None:
        problems.append("checkpoint.resume = true needs the run to continue: say run_dir")
    raise_all(problems)


def raise_all(problems: list[str]) -> None:
    """One error for all problems; nothing if there are none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} settings do not fit together:", *problems]))


def rollout_samples(config: RLConfig) -> int:
    """Samples of one rollout batch."""
    return config.rollout.prompts_per_step * config.rollout.group_size


def optimizer_steps(config: RunConfig, steps: int) -> int:
    """Optimizer steps in ``steps`` steps of a run."""
    if not isinstance(config, RLConfig):
        return steps
    samples = rollout_samples(config)
    return steps * config.train.updates_per_batch * ceil(samples / (config.train.batch_size or samples))


def check_warmup(config: RunConfig, steps: int) -> Iterator[str]:
    """A warm-up that the run never leaves."""
    total, warmup = optimizer_steps(config, steps), config.train.warmup_steps
    if warmup is not None and warmup > total:
        yield (
            f"train.warmup_steps = {warmup} is longer than the run of {total} optimizer steps; "
            f"the learning rate would never be reached. Use at most {total}, or train.warmup_ratio"
        )


def _check_train(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.steps is not None and train.epochs is not None:
        yield "train.steps and train.epochs both say how long to train; leave one out"
    if train.warmup_steps is not None and train.warmup_ratio is not None:
        yield "train.warmup_steps and train.warmup_ratio both say how long to warm up; leave one out"
    if train.schedule == "constant" and train.min_lr_ratio > 0:
        yield (
            f"train.min_lr_ratio = {train.min_lr_ratio:g} has no effect on the constant schedule; "
            "leave it out, or say train.schedule = 'cosine' or 'linear'"
        )
    if train.steps is not None:
        yield from check_warmup(config, train.steps)


def _check_eval(config: RunConfig) -> Iterator[str]:
    section, said = config.eval, settings(config, said_only=True)
    keys = [key for key in said if key.startswith("eval.") and said[key] not in (None, False)]
    if config.data.eval is None:
        if keys:
            yield f"{' and '.join(keys)} without an eval set: say data.eval, or leave [eval] out"
        return
    if section.samples == 1:
        yield from (
            f"{key} has no effect with eval.samples = 1, which is greedy; raise eval.samples"
            for key in ("eval.temperature", "eval.pass_at")
            if key in keys
        )
    elif section.pass_at is not None and max(section.pass_at, default=0) > section.samples:
        yield (
            f"eval.pass_at = {list(section.pass_at)} needs at least {max(section.pass_at)} samples "
            f"per prompt; eval.samples is {section.samples}"
        )


def _check_sft(config: SFTConfig) -> Iterator[str]:
    said = settings(config, said_only=True)
    for_sampling = (
        "eval.samples",
        "eval.temperature",
        "eval.pass_at",
        "system.kv_memory",
        "system.max_running",
        "system.max_prefill_tokens",
        "monitor.samples",
        "data.max_prompt_tokens",
        "train.updates_per_batch",
    )
    for key in for_sampling:
        if key in said:
            yield f"{key} has no effect in supervised training, which samples nothing; leave it out"
    longest, cap = config.data.max_tokens, config.system.max_tokens_per_microbatch
    if longest is not None and cap is not None and longest > cap:
        yield (
            f"system.max_tokens_per_microbatch = {cap} is a hard cap, and data.max_tokens = {longest} "
            f"lets longer samples in; make them equal"
        )


def _check_rl(config: RLConfig) -> Iterator[str]:
    rollout, reward = config.rollout, config.reward
    if not reward.functions:
        yield 'reward.functions is empty: say functions = ["rewards.py:name"] or a built-in such as "math"'
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        yield (
            f"reward.weights has {len(reward.weights)} numbers for {len(reward.functions)} reward.functions; "
            "give one each"
        )
    if rollout.temperature == 0:
        yield (
            "rollout.temperature = 0 is greedy: all rollouts of a prompt would be equal and nothing could be "
            "learned from them; use 1.0 or a little less"
        )
    if (size := config.train.batch_size) is not None and rollout_samples(config) % size:
        yield _indivisible(config, size)
    cap, longest = config.system.max_tokens_per_microbatch, rollout.max_new_tokens
    longest += config.data.max_prompt_tokens or 1
    if cap is not None and cap < longest:
        yield (
            f"system.max_tokens_per_microbatch = {cap} is a hard cap, and one rollout may take {longest} "
            f"tokens (prompt and rollout.max_new_tokens); raise it to at least {longest}"
        )


def _indivisible(config: RLConfig, size: int) -> str:
    samples = rollout_samples(config)
    fitting = [n for n in range(1, samples + 1) if samples % n == 0]
    below = max((n for n in fitting if n < size), default=1)
    above = min((n for n in fitting if n > size), default=samples)
    near = " or ".join(map(str, dict.fromkeys((below, above))))
    return (
        f"train.batch_size = {size} does not divide the {samples} samples of a rollout batch "
        f"(rollout.prompts_per_step × rollout.group_size); use {near}, or leave it out for all {samples}"
    )


def _check_algorithm(config: RLConfig) -> Iterator[str]:
    limit, section = config.rollout.max_new_tokens, config.algorithm
    try:
        section, _ = resolve_algorithm(section, max_new_tokens=limit)
    except ConfigError as error:
        yield str(error)
        return
    if "group" in algorithm_needs(section) and config.rollout.group_size == 1:
        yield (
            f"algorithm.advantage = '{section.advantage}' compares the rollouts of a prompt with each other, "
            "and rollout.group_size = 1 leaves nothing to compare; use 4 or more, "
            "or algorithm.name = 'reinforce'"
        )
    if section.overlong_buffer and section.overlong_buffer > limit:
        yield (
            f"algorithm.overlong_buffer = {section.overlong_buffer} is longer than "
            f"rollout.max_new_tokens = {limit}, so that no answer would be free of it"
        )
    if section.filter_low >= section.filter_high:
        yield (
            f"algorithm.filter_low = {section.filter_low:g} must be below "
            f"filter_high = {section.filter_high:g}; groups whose mean score lies strictly between are kept"
        )
    if section.reward_clip is not None and section.reward_clip[0] >= section.reward_clip[1]:
        yield f"algorithm.reward_clip = {list(section.reward_clip)}: the lower bound comes first"
