"""All layouts that a supervised run can have, by the cost model, without the planner's search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

from tests.support.hardware_table import MODELS
from tunesmith.config.changing import with_values
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import fits, host_problem, planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import refused_settings
from tunesmith.plan.said import open_plan

Settings = dict[str, Any]
WAYS: dict[str, list[str]] = {
    "full": [],
    "LoRA": ["lora.rank=16"],
    "QLoRA": ["lora.rank=16", "model.quantize=nf4"],
}


def supervised(model: str, on: str, way: str, tokens: int) -> tuple[SFTConfig, Facts]:
    """A run whose longest sample has ``tokens`` tokens, on a machine of ``machines.toml``."""
    hardware = machine(on)
    launched = len(hardware.gpus) if hardware.nodes > 1 else None
    known = replace(MODELS[model], family="llama", context=1 << 20)
    facts = Facts(hardware, known, train_size=1000, longest=tokens, ranks_here=launched)
    said = ["model.path=org/m", "data.train=org/d", *WAYS[way]]
    return load_config(SFTConfig, None, said), facts


def fastest_of_all(
    config: SFTConfig, facts: Facts, sample: int | None = None
) -> tuple[float, Settings] | None:
    """Seconds and settings of the fastest layout that fits and that no rule refuses.

    Args:
        sample: how many layouts are drawn; None: all are tried.
    """
    gpu = facts.hardware.gpus[0]
    dtype = "bfloat16" if gpu.capability >= (8, 0) else "float16"
    derived = {"system.device": "cuda", "model.dtype": dtype, "train.batch_size": 32}
    off = {"system.offload_reference": False, "system.compile": False}
    base = with_values(config, {**derived, **off})
    tried: Sequence[Settings] = [*every_layout(config, facts)]
    if sample is not None:
        tried = Random(0).sample(tried, min(sample, len(tried)))
    plans = ((open_plan(with_values(base, each), facts), each) for each in tried)
    timed = [(seconds, each) for plan, each in plans if (seconds := seconds_if_it_fits(plan))]
    for seconds, each in sorted(timed, key=lambda pair: pair[0]):
        if not any(refused_settings(open_plan(with_values(base, each), facts))):
            return seconds, each
    return None


def seconds_if_it_fits(plan: AnyPlan) -> float | None:
    devices = planned_devices(plan)
    roomy = all(fits(plan, *device) for device in devices)
    if not roomy or any(host_problem(plan, needed) for _, needed, _ in devices):
        return None
    return step_seconds(plan)["step"]


def every_layout(config: SFTConfig, facts: Facts) -> Iterator[Settings]:
    """Settings of all layouts on all GPUs, and on one."""
    model = facts.model
    longest = facts.longest
    count = len(facts.hardware.gpus) * facts.hardware.nodes
    assert model is not None and longest is not None
    for ranks in {1, count}:
        powers = [n for n in (1, 2, 4, 8, 16) if ranks % n == 0]
        sequences = [n for n in powers if n <= 8 and model.heads % n == 0]
        stages = [(0, None)] + [(stage, n) for stage in (1, 2, 3) for n in powers if n > 1]
        flags = [
            (optimizer, parameters, activations)
            for optimizer, parameters, activations in product((False, True), repeat=3)
            if optimizer or not parameters or config.lora.on
        ]
        for (stage, shards), (optimizer, parameters, activations) in product(stages, flags):
            if parameters and stage in (1, 2):
                continue  # refused: they gather all layers
            for size, again, larger in product(sequences, (False, 0.25, 0.5, 0.75, True), range(5)):
                yield {
                    "system.trainer_ranks": ranks,
                    "system.zero_stage": stage,
                    "system.shard_size": shards,
                    "system.sequence_parallel.size": size,
                    "system.gradient_checkpointing": again,
                    "system.offload_optimizer": optimizer,
                    "system.offload_parameters": parameters,
                    "system.offload_activations": activations,
                    "system.max_tokens_per_microbatch": longest * 2**larger * size,
                }


def sampled(model: str, on: str, said: Sequence[str]) -> tuple[RLConfig, Facts]:
    """A run of reinforcement learning with prompts of 1,024 tokens, sampled by vLLM."""
    known = replace(MODELS[model], family="llama", context=1 << 20)
    facts = Facts(machine(on), known, train_size=1000, longest=1024)
    base = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    return load_config(RLConfig, None, [*base, "system.engine=vllm", *said]), facts


def every_rl_layout(gpus: int) -> Iterator[Settings]:
    """Engines and trainer in turn on the same GPUs, or with GPUs of their own, in all numbers."""
    for tensor, ranks, stage in product((1, 2, 4, 8), range(1, gpus + 1), range(4)):
        if stage and ranks == 1:
            continue
        shared = {"system.trainer_ranks": ranks, "system.zero_stage": stage}
        shared |= {"system.vllm.tensor_parallel_size": tensor, "system.engine_process": True}
        for engines in range(1, gpus // tensor + 1):
            yield {**shared, "system.engines": engines, "system.hybrid": True}
        for engines in range(1, (gpus - ranks) // tensor + 1):
            yield {**shared, "system.engines": engines, "system.hybrid": False}


def fastest_rl_layout(config: RLConfig, facts: Facts, sample: int) -> tuple[float, Settings] | None:
    """Seconds and settings of the fastest of so many layouts of ``every_rl_layout``, each with the
    best of what saves memory; None if none of them fits."""
    layouts = [*every_rl_layout(len(facts.hardware.gpus))]
    best: tuple[float, Settings] | None = None
    for each in Random(0).sample(layouts, min(sample, len(layouts))):
        with suppress(ConfigError):
            seconds = step_seconds(resolve(with_values(config, each), facts))["step"]
            if best is None or seconds < best[0]:
                best = (seconds, each)
    return best
