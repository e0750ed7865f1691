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
from urllib.parse import urlsplit

from tunesmith.config.commands import OfflineDistillConfig, SamplingConfig
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.config.section import known
from tunesmith.config.system import SystemSection, VllmSection
from tunesmith.config.values import format_size, parse_size
from tunesmith.errors import ConfigError, nearest
from tunesmith.plan.cost.memory import kv_bytes_per_number
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.cluster import cluster_problems, ray_not_installed
from tunesmith.plan.processes.devices import device_problems
from tunesmith.plan.rules.rules import refused_problems, unread_problems
from tunesmith.plan.rules.situation import resolved_algorithm, situation
from tunesmith.plan.rules.vllm import vllm_not_installed, vllm_problems
from tunesmith.types import altering

_TRAINER_KEYS = (
    *("profile", "tuned", "device", "device_memory", "threads", "compile", "kernels", "max_tokens_per_microbatch"),
    *("scoring_max_tokens", "share_prompts", "gradient_checkpointing", "logprob_chunk", "trainer_ranks", "zero_stage"),
    *("shard_size", "sequence_parallel", "trainer_restarts", "offload_activations", "offload_reference"),
    *("offload_optimizer", "offload_parameters", "hybrid", "canary", "vllm"),
)
SAMPLER_KEYS = (
    *(f"system.{key}" for key in SystemSection.model_fields if key not in _TRAINER_KEYS),
    *(f"system.vllm.{key}" for key in VllmSection.model_fields),
)
"""Settings that only sampling runs read; ``hybrid`` and ``canary`` have their own rules."""
BLOCK = 16
"""Tokens per block of the local engine's KV cache."""
MOST_ROLLOUTS = 10**6
"""Maximum rollouts per step; the largest published runs have a few thousand."""
LEAST_LIGER = (0, 8, 2)
"""The first Liger version with a kernel for gate and up in one tensor."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ROLLOUTS = ("accuracy", "reward", "length", "answered", "failed")
_PREFERENCES = ("loss", "accuracy", "margin", "nll", *(f"rewards/{n}" for n in ("chosen", "rejected", "mean", "std")))
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
    values = situation(config, facts)
    yield from refused_problems(values)
    yield from _check_metric(config)
    yield from _check_engine(config)
    yield from vllm_problems(config, facts, values)
    yield from cluster_problems(config)
    if isinstance(config, RLConfig):
        yield from _check_batch(config, facts)
        try:
            resolved_algorithm(config)
        except ConfigError as error:
            yield str(error)
    if facts is not None:
        yield from device_problems(config, len(facts.hardware.gpus))
        yield from _check_kv_memory(config, facts)
        yield from _check_stop_tokens(config, facts)


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


def _check_kv_memory(config: RunConfig, facts: Facts) -> Iterator[str]:
    """A problem if ``system.kv_memory`` cannot hold the data's longest prompt with its completion, in local engines.

    Both are stored in blocks of ``BLOCK`` tokens; the last token's keys and values are never read.
    """
    model, kv = facts.model, known(config.system, "kv_memory")
    derived = known(config.model, "dtype") is not None and known(config.system, "compile") is not None
    samples = config.samples and not config.system.engine_kind.third_party and derived
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


def _check_stop_tokens(config: RunConfig, facts: Facts) -> Iterator[str]:
    """A problem if a token at which sampling is to stop is none of the model's."""
    section = config.sampling_settings
    if section is None or facts.model is None:
        return
    rows = facts.model.vocab_size
    if wrong := [token for token in section.stop_token_ids if not 0 <= token < rows]:
        yield (
            f"{section.table}.stop_token_ids has {wrong[0]}, and the model's embedding has {rows} rows: it never "
            f"samples that token. Valid: 0 to {rows - 1}"
        )


def _check_batch(config: RLConfig, facts: Facts | None) -> Iterator[str]:
    size, samples = known(config.train, "batch_size"), config.rollout.samples
    # Where the data has fewer prompts than were asked for, the last optimizer batch of a step is short.
    lowered = facts is not None and facts.train_size == config.rollout.prompts_per_step
    if samples > MOST_ROLLOUTS:
        yield (
            f"rollout.prompts_per_step × rollout.group_size = {samples} rollouts per step, and the limit is "
            f"{MOST_ROLLOUTS}; lower one of them"
        )
    elif size is not None and samples % size and not lowered:
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        below = max((n for n in fitting if n < size), default=1)
        above = min((n for n in fitting if n > size), default=samples)
        near = " or ".join(map(str, dict.fromkeys((below, above))))
        yield (
            f"train.batch_size = {size} does not divide the {samples} samples of a rollout batch "
            f"(rollout.prompts_per_step × rollout.group_size); use {near}, or leave it out for all {samples}"
        )


def _check_engine(config: RunConfig) -> Iterator[str]:
    """Problems with HTTP servers and with the sampling settings they would have to support."""
    system, sampling = config.system, config.sampling_settings
    if sampling and (why := system.engine_kind.unaltered_only):
        for name, value in altering(sampling).items():
            key = f"{sampling.table}.{name} = {value:g}"
            yield f'{key} does not go with system.engine = "{system.engine}": {why}; leave it out'
    if not system.engine_kind.served:
        return
    if len(set(system.engine_urls)) < len(system.engine_urls):
        yield "system.engine_urls names a server twice; name each server once"
    far = [url for url in system.engine_urls if urlsplit(url).hostname not in _LOOPBACK]
    if far and system.engine_directory is None:
        yield (
            f"weights reach {far[0]} through files: set system.engine_directory to a directory that this machine and "
            "the server's see under the same path"
        )
    if system.engine_directory is not None and not system.engine_directory.is_dir():
        yield f"system.engine_directory = '{system.engine_directory}' is not a directory"


def _check_metric(config: RunConfig) -> Iterator[str]:
    """Refuse an ``eval.metric`` that the run's evaluations do not have."""
    metric = config.eval.metric
    if metric is None or config.data.eval is None or isinstance(config, SamplingConfig):
        return
    names = [f"eval/{name}" for name in _metrics(config)]
    if metric not in names:
        yield f"eval.metric = '{metric}' is not one of this run's metrics.{nearest(metric, names)}"


def _metrics(config: RunConfig) -> Iterator[str]:
    if not isinstance(config, RLConfig):
        supervised = ("loss", "nll", "teacher_kl") if isinstance(config, OfflineDistillConfig) else ("loss",)
        yield from supervised if isinstance(config, SFTConfig) else _PREFERENCES
        return
    section, reward = config.eval, config.reward
    yield from _ROLLOUTS
    powers = [2**n for n in range(section.samples.bit_length())]
    yield from (f"pass@{k}" for k in (section.pass_at or powers) if section.samples > 1)
    named = [entry.name for entry in (*reward.models, *reward.remote)]
    for name in (*reward.functions, *named, *(["environment"] if config.environment.used else [])):
        yield from (f"reward/{name}", f"reward/{name.rpartition(':')[2]}")
