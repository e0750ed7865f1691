"""The longest sequence that fits a machine: the run with it is planned, and a longer one is
refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT
from tests.support.hardware_table import MODELS
from tests.support.hub_of_sizes import serve
from tunesmith.config.commands import DPOConfig, RFTConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.config.system import SystemSection
from tunesmith.errors import CapacityError
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.longest import FINENESS, length_setting, longest_that_fits
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.said import reopened
from tunesmith.run.assembly.planning import plan_longest, plan_run

EIGHT = replace(MODELS["7B (Qwen 2.5)"], context=1 << 24)
REWARD = 'reward.functions=["math"]'


def resolved(kind: Any, on: str, longest: int, *said: str, host: int | None = None) -> AnyPlan:
    hardware = machine(on)
    hardware = replace(hardware, memory_available=host or hardware.memory_available)
    base = ["model.path=org/m", "data.train=org/d", *said]
    facts = Facts(hardware, EIGHT, train_size=1000, longest=longest)
    return resolve(load_config(kind, None, base), facts)


def longest(kind: Any, on: str, *said: str, most: int = 1 << 24, **changes: Any) -> int | None:
    plan = resolved(kind, on, 64, *said, **changes)
    return longest_that_fits(reopened(plan, plan.said.system), most)


@pytest.mark.parametrize(
    ("kind", "on", "said"),
    [
        (SFTConfig, "H100-80GB", ()),
        (SFTConfig, "A10G-24GB", ("lora.rank=16",)),
        (SFTConfig, "2xA100-80GB", ("system.zero_stage=3",)),
        (SFTConfig, "A100-80GB", ("lora.rank=16", "system.offload_activations=false")),
        (DPOConfig, "H100-80GB", ("lora.rank=16",)),
    ],
)
def test_it_fits_and_a_longer_one_is_refused(kind: Any, on: str, said: tuple[str, ...]) -> None:
    tokens = longest(kind, on, *said)
    assert tokens
    assert resolved(kind, on, tokens, *said).memory.microbatch == tokens
    with pytest.raises(CapacityError):
        resolved(kind, on, tokens + tokens // FINENESS + 64, *said)


@pytest.mark.more
def test_more_memory_and_more_gpus_train_longer_ones() -> None:
    adapter = "lora.rank=16"
    alone = longest(SFTConfig, "H100-80GB", adapter)
    smaller = longest(SFTConfig, "H100-80GB", adapter, "system.device_memory=40GB")
    eight = longest(SFTConfig, "8xH100-80GB", adapter)
    without_host = longest(SFTConfig, "H100-80GB", adapter, host=10**9)
    assert alone and smaller and eight and without_host
    assert smaller < alone < eight and without_host < alone


def test_it_is_at_most_what_was_asked() -> None:
    assert longest(SFTConfig, "H100-80GB", "lora.rank=16", most=8192) == 8192
    assert longest(SFTConfig, "H100-80GB", "lora.rank=16", most=32) is None


def test_what_does_not_fit_at_all_has_none() -> None:
    plan = resolved(SFTConfig, "H100-80GB", 64)
    small = SystemSection(device_memory="4GB")
    assert longest_that_fits(reopened(plan, small)) is None


def test_a_refusal_names_the_longest_samples_that_fit() -> None:
    said = ("lora.rank=16", "system.offload_activations=false", "system.device_memory=24GB")
    tokens = longest(SFTConfig, "H100-80GB", *said)
    with pytest.raises(CapacityError) as error:
        resolved(SFTConfig, "H100-80GB", 1 << 20, *said, host=10**9)
    assert tokens and "samples of at most" in str(error.value)
    named = int(str(error.value).partition("samples of at most ")[2].split()[0])
    assert resolved(SFTConfig, "H100-80GB", named, *said, host=10**9)


def test_a_refusal_names_the_longest_sequences_of_a_pair() -> None:
    said = ("lora.rank=16", "system.offload_activations=false", "system.device_memory=24GB")
    with pytest.raises(CapacityError) as error:
        resolved(DPOConfig, "H100-80GB", 1 << 20, *said, host=10**9)
    named = str(error.value).partition("What fits: sequences of a pair of at most ")[2]
    assert resolved(DPOConfig, "H100-80GB", 2 * int(named.split()[0]), *said, host=10**9)


def test_a_setting_gives_the_length(tmp_path: Path) -> None:
    game = tmp_path / "env.py"
    game.write_text("class Game: ...")
    base = ["model.path=org/m", "data.train=org/d"]
    rl = load_config(RLConfig, None, [*base, REWARD])
    turns = load_config(RLConfig, None, [*base, REWARD, f"environment.path={game}:Game"])
    rft = load_config(RFTConfig, None, [*base, REWARD, "rft.threshold=1"])
    assert length_setting(load_config(SFTConfig, None, base), 99, 9) == ("data.max_tokens", 99)
    assert length_setting(rl, 99, 9) == ("rollout.max_new_tokens", 90)
    assert length_setting(turns, 99, 9) == ("environment.max_tokens", 99)
    assert length_setting(rft, 99, 9) == ("sampling.max_new_tokens", 90)


QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    **QWEN, "model_type": "llama", "num_hidden_layers": 32, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
SMALL = {
    **QWEN, "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "head_dim": 128,
    "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.more
def test_the_documentation_says_what_is_planned_beside_unsloth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    serve({"org/qwen": QWEN, "org/llama": LLAMA, "org/small": SMALL}, tmp_path, monkeypatch)
    qlora = ["data.train=org/d", "lora.rank=16", "model.quantize=nf4"]
    for said in ([], ["system.offload_activations=false"]):
        config = load_config(SFTConfig, None, ["model.path=org/qwen", *qlora, *said])
        longest = plan_longest(config, "H100-80GB")[1].training.longest
        assert f"| {longest:,} tokens |" in page
    for model, new, fits, short in (
        ("org/llama", 19456, "16GB", "15GB"),
        ("org/small", 1024, "3.2GB", "3GB"),
    ):
        said = ["data.max_prompt_tokens=1024", f"rollout.max_new_tokens={new}", REWARD]
        said += [*qlora, f"model.path={model}", "system.engine=local"]
        config = load_config(RLConfig, None, [*said, f"system.device_memory={fits}"])
        assert plan_run(config, "H100-80GB") and f"| {fits.replace('GB', ' GB')} |" in page
        with pytest.raises(CapacityError):
            config = load_config(RLConfig, None, [*said, f"system.device_memory={short}"])
            plan_run(config, "H100-80GB")
