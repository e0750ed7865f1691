"""The layout that a run gets is the fastest that fits, of all layouts by the same cost model."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from tests.support.every_layout import (
    WAYS,
    fastest_of_all,
    fastest_rl_layout,
    sampled,
    seconds_if_it_fits,
    supervised,
)
from tests.support.hardware_table import MODELS, TOKENS
from tests.support.long import again
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import CapacityError
from tunesmith.plan.cost.memory import LIMIT, LIMIT_OF_SEVERAL, planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts
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
CLOSE = 1.05
"""A layout may take this much longer than the fastest: numbers of tokens and of recomputed layers
are rounded."""
SHAPES = [
    ("1B (Llama 3.2)", "A10G-24GB", TOKENS),
    ("7B (Qwen 2.5)", "8xH100-80GB", TOKENS),
    ("7B (Qwen 2.5)", "2x8xH100-80GB", TOKENS),
    ("7B (Qwen 2.5)", "H100-80GB", 16384),
    ("7B (Qwen 2.5)", "8xA10G-24GB", 32768),
    ("13B (Llama 2)", "2xA100-80GB", TOKENS),
    ("70B (Llama 3)", "8xA100-80GB", TOKENS),
    ("70B (Llama 3)", "8xH100-80GB", 131072),
    ("70B (Llama 3)", "2x8xH100-80GB", TOKENS),
    ("32B (Qwen 2.5)", "H200-141GB", TOKENS),
]


def check(model: str, on: str, way: str, tokens: int = TOKENS, sample: int | None = None) -> None:
    config, facts = supervised(model, on, way, tokens)
    fastest = fastest_of_all(config, facts, sample)
    try:
        chosen = resolve(config, facts)
    except CapacityError:
        assert fastest is None, f"{fastest} fits"
        return
    ours = seconds_if_it_fits(chosen)
    limit = LIMIT_OF_SEVERAL if chosen.devices.trainer_ranks > 1 else LIMIT
    assert ours and all(
        needed.peak <= limit * free for _, needed, free in planned_devices(chosen)
    ), "nothing above the limit is chosen"
    assert not [*refused_settings(chosen)]
    assert fastest is None or ours <= CLOSE * fastest[0], fastest


@pytest.fixture(autouse=True)
def quantises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", Mock())


@pytest.mark.parametrize("way", ["full", "LoRA"])
@pytest.mark.parametrize(("model", "on", "tokens"), SHAPES[:8])
def test_no_sampled_layout_is_better(model: str, on: str, tokens: int, way: str) -> None:
    check(model, on, way, tokens, sample=200)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("model", "on", "tokens"), SHAPES)
def test_no_layout_of_these_shapes_is_better(model: str, on: str, tokens: int, way: str) -> None:
    check(model, on, way, tokens)


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
    assert all(
        each["times"] >= 1 and each["share"] <= LIMIT_OF_SEVERAL for each in found["next_best"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "LoRA", "a KL", "ahead"])
@pytest.mark.parametrize(
    ("model", "on"),
    [
        ("1B (Llama 3.2)", "2xA10G-24GB"),
        ("7B (Qwen 2.5)", "8xH100-80GB"),
        again("7B (Qwen 2.5)", "4xA100-40GB"),
        again("13B (Llama 2)", "8xA100-80GB"),
        again("32B (Qwen 2.5)", "8xH100-80GB"),
        again("70B (Llama 3)", "8xH200-141GB"),
    ],
)
def test_no_numbers_of_engines_and_ranks_are_better(model: str, on: str, way: str) -> None:
    """For reinforcement learning: engines, their sizes, trainer ranks, apart or in turn."""
    said = {
        "full": [],
        "LoRA": ["lora.rank=16"],
        "a KL": ["algorithm.kl.coef=0.01"],
        "ahead": ["rollout.max_staleness=1"],
    }[way]
    config, facts = sampled(model, on, said)
    fastest = fastest_rl_layout(config, facts, 120)
    try:
        ours = step_seconds(resolve(config, facts))["step"]
    except CapacityError:
        assert fastest is None, f"{fastest} fits"
        return
    assert fastest is None or ours <= CLOSE * fastest[0], fastest


def test_what_rules_refuse_is_not_chosen() -> None:
    for said in (["train.optimizer=muon"], ["system.compile=default"]):
        _, facts = supervised("7B (Qwen 2.5)", "8xA100-80GB", "full", TOKENS)
        config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", *said])
        assert not [*refused_settings(resolve(config, facts))]
