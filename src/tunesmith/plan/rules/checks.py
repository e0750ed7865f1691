"""Refusals before anything is loaded: settings that contradict each other or facts about the run.

Most are rules in ``refused.toml``, ``refused_system.toml`` and ``unread.toml``; the functions here do more than
compare values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import ceil

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.sizes import format_size, parse_size
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import kv_bytes_per_number
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.cluster import cluster_problems, ray_not_installed
from tunesmith.plan.processes.devices import device_problems
from tunesmith.plan.rules.engine import SAMPLER_KEYS, server_problems
from tunesmith.plan.rules.evaluation import metric_problems
from tunesmith.plan.rules.rules import refused_problems, unread_problems
from tunesmith.plan.rules.situation import resolved_algorithm, rollout_samples, situation
from tunesmith.plan.rules.vllm import vllm_misfits, vllm_not_installed, vllm_problems

BLOCK = 16
"""Tokens per block of the local engine's KV cache."""
MOST_ROLLOUTS = 10**6
"""Maximum rollouts per step; the largest published runs have a few thousand."""
LEAST_LIGER = (0, 8, 2)
"""The first Liger version with a kernel for gate and up in one tensor."""
FOR_SAMPLING = (
    *("eval.samples", "eval.temperature", "eval.pass_at", *SAMPLER_KEYS),
    *("monitor.samples", "monitor.tokens", "monitor.rollouts_size", "data.max_prompt_tokens", "train.passes_per_batch"),
)


def check(config: RunConfig, *, installed: bool = True) -> None:
    """Refuse a configuration that contradicts itself, with all contradictions listed.

    Args:
        installed: also refuse settings that need a library missing from this environment.

    Raises:
        ConfigError: names the keys, why they conflict, and what to change.
    """
    problems = [*unread_problems(config, situation(config, None)), *contradictions(config)]
    if installed:
        problems += [*_not_installed(config), *vllm_not_installed(config), *ray_not_installed(config)]
    if config.supervised:
        given = settings(config, given_only=True)
        why = "has no effect in supervised training, which samples nothing; leave it out"
        problems += [f"{key} {why}" for key in FOR_SAMPLING if key in given]
    raise_all(problems)


def raise_all(problems: list[str]) -> None:
    """Raise one ConfigError for all problems, if there are any."""
    if problems:
        raise ConfigError(*problems)


def contradictions(config: RunConfig, facts: Facts | None = None) -> Iterator[str]:
    """Contradictions between settings and, if facts are given, between settings and facts."""
    yield from refused_problems(situation(config, facts))
    yield from metric_problems(config)
    yield from server_problems(config)
    yield from vllm_problems(config)
    yield from cluster_problems(config)
    if isinstance(config, RLConfig):
        yield from _check_batch(config)
        try:
            resolved_algorithm(config)
        except ConfigError as error:
            yield str(error)
    if facts is not None:
        yield from vllm_misfits(config, facts)
        yield from device_problems(config, len(facts.hardware.gpus))
        yield from _kv_problems(config, facts)


def _not_installed(config: RunConfig) -> Iterator[str]:
    if config.model.quantize and find_spec("bitsandbytes") is None:
        yield (
            f"model.quantize = '{config.model.quantize}' needs bitsandbytes, which is not installed: "
            "pip install 'tunesmith[quantize]', or leave model.quantize out"
        )
    if config.system.kernels == "liger" and (found := _liger_installed()) < LEAST_LIGER:
        least, there = (".".join(map(str, numbers)) for numbers in (LEAST_LIGER, found))
        yield (
            f"system.kernels = 'liger' needs liger-kernel {least} or newer, which is not installed"
            f"{there and f' (there is {there})'}: pip install 'tunesmith[liger]', or leave system.kernels out"
        )


def _liger_installed() -> tuple[int, ...]:
    """The version of Liger in this environment; empty if it is not installed."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", version("liger-kernel"))[:3])
    except PackageNotFoundError:
        return ()


def _kv_problems(config: RunConfig, facts: Facts) -> Iterator[str]:
    """A problem if ``system.kv_memory`` cannot hold the data's longest prompt with its completion, in local engines.

    Both are stored in blocks of ``BLOCK`` tokens; the last token's keys and values are never read.
    """
    model, kv = facts.model, known(config.system, "kv_memory")
    derived = known(config.model, "dtype") is not None and known(config.system, "compile") is not None
    samples = config.samples and config.system.engine == "local" and derived
    if model is None or kv is None or facts.longest is None or not samples:
        return
    new = config.new_tokens
    tokens = sum(-(-count // BLOCK) * BLOCK for count in (facts.longest, max(1, new - 1)))
    per_token = model.kv_bytes_per_token(kv_bytes_per_number(config, facts)) * (1 + 1 / (2 * model.layers))
    if (needed := ceil(tokens * per_token)) > parse_size(kv):
        yield (
            f"system.kv_memory = {kv} does not hold one prompt of {facts.longest} tokens with {new} new ones, which "
            f"takes {format_size(needed)}; raise it, leave it out, or lower max_new_tokens"
        )


def _check_batch(config: RLConfig) -> Iterator[str]:
    size, samples = known(config.train, "batch_size"), rollout_samples(config)
    if samples > MOST_ROLLOUTS:
        yield (
            f"rollout.prompts_per_step × rollout.group_size = {samples} rollouts per step, and the limit is "
            f"{MOST_ROLLOUTS}; lower one of them"
        )
    elif size is not None and samples % size:
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        below = max((n for n in fitting if n < size), default=1)
        above = min((n for n in fitting if n > size), default=samples)
        near = " or ".join(map(str, dict.fromkeys((below, above))))
        yield (
            f"train.batch_size = {size} does not divide the {samples} samples of a rollout batch "
            f"(rollout.prompts_per_step × rollout.group_size); use {near}, or leave it out for all {samples}"
        )
