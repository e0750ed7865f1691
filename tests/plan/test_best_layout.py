"""The layout that a run gets is the fastest that fits, of all layouts by the same cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from tests.support.hardware_table import MODELS, TOKENS
from tunesmith.config.changing import with_values
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import CapacityError
from tunesmith.plan.cost.memory import LIMIT, host_problem, planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan, open_plan
from tunesmith.plan.report import report_of
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import refused_settings

GPUS = ("T4-16GB", "A10G-24GB", "L4-24GB", "A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB")
MACHINES = [
    *GPUS,
    *(f"{count}x{gpu}" for gpu in GPUS for count in (2, 8)),
    "2x8xA100-80GB",
    "2x8xH100-80GB",
]
WAYS = {"full": [], "LoRA": ["lora.rank=16"]}
CLOSE = 1.05
"""A layout may take this much longer than the fastest: numbers of tokens and of recomputed layers
are rounded."""


def case(model: str, on: str, way: str) -> tuple[Any, Facts]:
    hardware = machine(on)
    launched = len(hardware.gpus) if hardware.nodes > 1 else None
    found = replace(MODELS[model], family="llama")
    facts = Facts(hardware, found, train_size=1000, longest=TOKENS, ranks_here=launched)
    return load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", *WAYS[way]]), facts


def everything(config: Any, facts: Facts) -> Iterator[dict[str, Any]]:
    """Settings of all layouts on all GPUs, and on one."""
    model = facts.model
    count = len(facts.hardware.gpus) * facts.hardware.nodes
    assert model is not None
    for ranks in {1, count}:
        powers = [n for n in (1, 2, 4, 8, 16) if ranks % n == 0]
        sequences = [n for n in powers if n <= 8 and model.heads % n == 0]
        stages = [(0, None)] + [(stage, n) for stage in (1, 2, 3) for n in powers if n > 1]
        flags = [
            (o, p, a)
            for o, p, a in product((False, True), repeat=3)
            if o or not p or config.lora.on
        ]
        for (stage, shards), (optimizer, parameters, activations) in product(stages, flags):
            if parameters and stage in (1, 2):
                continue  # refused: they gather all layers
            for size, again, tokens in product(sequences, (False, 0.25, 0.5, 0.75, True), range(5)):
                yield {
                    "system.trainer_ranks": ranks,
                    "system.zero_stage": stage,
                    "system.shard_size": shards,
                    "system.sequence_parallel.size": size,
                    "system.gradient_checkpointing": again,
                    "system.offload_optimizer": optimizer,
                    "system.offload_parameters": parameters,
                    "system.offload_activations": activations,
                    "system.max_tokens_per_microbatch": TOKENS * 2**tokens * size,
                }


def seconds_if_it_fits(plan: AnyPlan) -> float | None:
    devices = planned_devices(plan)
    if any(needed.peak > LIMIT * free or host_problem(plan, needed) for _, needed, free in devices):
        return None
    return step_seconds(plan)["step"]


def check(model: str, on: str, way: str, sample: int | None = None) -> None:
    config, facts = case(model, on, way)
    base = with_values(config, {"system.device": "cuda", "model.dtype": "bfloat16"})
    ours = None
    if facts.hardware.gpus[0].capability < (8, 0):
        base = with_values(base, {"model.dtype": "float16"})
    base = with_values(
        base, {"train.batch_size": 32, "system.offload_reference": False, "system.compile": False}
    )
    try:
        chosen = resolve(config, facts)
    except CapacityError:
        pass
    else:
        ours = seconds_if_it_fits(chosen)
        assert ours or chosen.notes, "a layout that may not fit has a note"
    tried = [*everything(config, facts)]
    found = [
        (seconds_if_it_fits(open_plan(with_values(base, each), facts)), each)
        for each in (tried if sample is None else Random(0).sample(tried, min(sample, len(tried))))
    ]
    fitting = sorted(
        ((seconds, each) for seconds, each in found if seconds), key=lambda pair: pair[0]
    )
    if ours is None:
        assert not fitting, f"{fitting[0][1]} fits"
    elif fitting:
        assert ours <= CLOSE * fitting[0][0], fitting[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("model", "on"),
    [
        ("1B (Llama 3.2)", "A10G-24GB"),
        ("7B (Qwen 2.5)", "8xH100-80GB"),
        ("13B (Llama 2)", "2xA100-80GB"),
        ("70B (Llama 3)", "8xA100-80GB"),
        ("70B (Llama 3)", "2x8xH100-80GB"),
        ("32B (Qwen 2.5)", "H200-141GB"),
    ],
)
def test_no_sampled_layout_is_better(model: str, on: str, way: str) -> None:
    check(model, on, way, sample=400)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_no_layout_is_better(model: str, on: str, way: str) -> None:
    check(model, on, way)


@pytest.mark.parametrize(
    "said", [(), ("system.engine=vllm",), ("system.engine=vllm", "rollout.max_staleness=1")]
)
@pytest.mark.parametrize(
    "model", ["7B (Qwen 2.5)", pytest.param("70B (Llama 3)", marks=pytest.mark.slow)]
)
def test_no_other_layout_of_the_plan_is_faster(model: str, said: tuple[str, ...]) -> None:
    facts = Facts(machine("8xH100-80GB"), MODELS[model], train_size=1000, longest=1024)
    base = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    config = load_config(RLConfig, None, [*base, *said])
    try:
        resolved = resolve(config, facts)
    except CapacityError:
        assert not said, "only the local engine, which is on one GPU, does not fit"
        return
    found = report_of(config, resolved)
    assert all(each["times"] >= 1 and each["share"] <= LIMIT for each in found["next_best"])


def test_what_rules_refuse_is_not_chosen() -> None:
    for said in (
        ["train.optimizer=muon"],
        ["system.compile=default"],
        ["train.optimizer=muon", "lora.rank=8"],
    ):
        config, facts = case("7B (Qwen 2.5)", "8xA100-80GB", "full")
        config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", *said[:1]])
        chosen = resolve(config, facts)
        assert not [*refused_settings(chosen)]
