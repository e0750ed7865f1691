"""What the refusal of a run says would fit, fits."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.support.hardware_table import MODELS
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts, FastEngine
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve

APART = ("system.engine=local", "system.engine_process=true")
SECOND_COPY = ("lora.rank=8", "model.quantize=nf4", "system.engine=vllm")
FITS = re.compile(r"What fits: (.*?)(?: \([\d.]+.B\))?(?:, or|\. )")


def resolved(kind: type[RunConfig], model: str, on: str, *said: str) -> AnyPlan:
    base = ["model.path=org/m", "data.train=org/d"]
    base += ['reward.functions=["math"]'] if kind is RLConfig else []
    engine = FastEngine("vllm", "there") if kind is RLConfig else None
    facts = Facts(machine(on), MODELS[model], train_size=1000, longest=1024, fast_engine=engine)
    return resolve(load_config(kind, None, [*base, *said]), facts)


@pytest.mark.parametrize(
    ("kind", "model", "on", "said", "fits"),
    [
        (RLConfig, "7B (Qwen 2.5)", "RTX3090", (), "lora.rank = 16"),
        (RLConfig, "7B (Qwen 2.5)", "T4", (), 'lora.rank = 16 and model.quantize = "int8"'),
        (RLConfig, "7B (Qwen 2.5)", "T4", ("lora.rank=8",), 'model.quantize = "int8"'),
        (RLConfig, "32B (Qwen 2.5)", "2xRTX4090", (), 'model.quantize = "nf4"'),
        (RLConfig, "13B (Llama 2)", "A100-40GB", ("system.engine=vllm",), "lora.rank = 16"),
        (RLConfig, "70B (Llama 3)", "8xH200", APART, "lora.rank = 16"),
        (RLConfig, "7B (Qwen 2.5)", "T4", SECOND_COPY, 'system.engine = "local"'),
        (SFTConfig, "7B (Qwen 2.5)", "2xRTX4090", (), "lora.rank = 16"),
        (SFTConfig, "70B (Llama 3)", "A100-80GB", (), "lora.rank = 16"),
    ],
)
def test_what_a_refusal_says_fits(
    kind: type[RunConfig],
    model: str,
    on: str,
    said: tuple[str, ...],
    fits: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for an engine that a run gets only where the fastest one has no room."""
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", bool)  # bitsandbytes
    with pytest.raises(CapacityError) as refused:
        resolved(kind, model, on, *said)
    found = FITS.search(str(refused.value))
    assert found and fits in found[1], refused.value
    said = said if "engine" not in fits else said[:-1]
    plan = resolved(kind, model, on, *said, *found[1].replace(" = ", "=").split(" and "))
    assert all(needed.peak <= 0.95 * free for _, needed, free in planned_devices(plan))


@pytest.mark.parametrize(
    ("kind", "model", "on"),
    [(RLConfig, "7B (Qwen 2.5)", "RTX3090"), (SFTConfig, "32B (Qwen 2.5)", "A100-40GB")],
)
def test_as_many_gpus_are_advised_as_all_layouts_need(
    kind: type[RunConfig], model: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advised() -> str:
        with pytest.raises(CapacityError, match="such GPUs") as refused:
            resolved(kind, model, on)
        return str(refused.value)

    fewer = advised()
    monkeypatch.setattr("tunesmith.plan.layout.fitting._roomiest", list)
    assert advised() == fewer


def test_the_largest_model_counts_what_the_own_engine_can_keep_in_4_bits() -> None:
    with pytest.raises(CapacityError, match=r"may have \d\dB parameters"):
        resolved(RLConfig, "70B (Llama 3)", "A10G-24GB")
    with pytest.raises(CapacityError) as refused:
        resolved(RLConfig, "70B (Llama 3)", "L40S-48GB")
    told = re.search(r"may have (\d+)B", str(refused.value))
    assert told is None or int(told[1]) < 70, "what needs host memory that is not there is no way"


def test_completions_longer_than_the_context_are_refused_before_layouts_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tunesmith.plan.resolve.with_layout", Mock(side_effect=AssertionError))
    with pytest.raises(ConfigError, match="leaves no room in the model's context of 4096"):
        resolved(RLConfig, "13B (Llama 2)", "8xH200", "rollout.max_new_tokens=32768")


def test_a_refusal_says_that_another_gpu_is_free() -> None:
    """A colleague's job on the first one."""
    here = machine("8xH100-80GB")
    gpus = (replace(here.gpus[0], memory_free=10**9), *here.gpus[1:])
    facts = Facts(replace(here, gpus=gpus), MODELS["7B (Qwen 2.5)"], train_size=9, longest=1024)
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", "lora.rank=8"])
    with pytest.raises(CapacityError, match=r"has 1GB free .* Leave it out with CUDA_VISIBLE_DEV"):
        resolve(config, facts)
    assert resolve(config, replace(facts, hardware=replace(here, gpus=gpus[1:])))
