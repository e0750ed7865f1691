"""The cost model of memory: bytes by hand, what is refused and with which remedy, facts of hub
models, the table."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.hardware_table import GPUS, MODELS, TOKENS, WAYS, fits, needed
from tests.support.planned_memory import (
    A10G,
    A100,
    GB,
    LLAMA_70B,
    QWEN_7B,
    SMALL,
    on,
    refusal,
    resolved,
)
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings
from tunesmith.cli.main import app
from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    GenerateConfig,
    RFTConfig,
    RMConfig,
)
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.config.values import parse_size
from tunesmith.errors import ModelError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.shard_files import WeightFiles, names_in
from tunesmith.plan.cost.activations import activation_bytes, layer_bytes, recomputed
from tunesmith.plan.cost.copies import adapter_numbers, copy_bytes
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import CPU_MARGIN, LIMIT, host_tokens, planned, request_kv
from tunesmith.plan.cost.price import price
from tunesmith.plan.facts import hub
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.facts.model import ModelFacts, facts_of, read_model_facts
from tunesmith.plan.report import memory_of, memory_rows
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules import checks
from tunesmith.records.memory import memory_metrics
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.engines.local.pool import KVLayout, KVPool
from tunesmith.run.trainers.optimizer import AdamWSettings, MasterOptimizer

LLAMA_8B = ModelFacts(8_030_261_248, 32, 4096, 14336, 32, 8, 128, 128256, 131072)


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 18), (torch.float32, 16)])
def test_the_trainer_holds_so_many_bytes_of_each_number(
    tmp_path: Path, dtype: torch.dtype, each: int
) -> None:
    """Counted in the optimizer itself, after a backward pass and a step."""
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=dtype)
    optimizer = MasterOptimizer(model.module, AdamWSettings())
    count = sum(p.numel() for p in optimizer.parameters.values())

    def gradients() -> None:
        for parameter in optimizer.parameters.values():
            parameter.sum().backward()  # pyright: ignore[reportUnknownMemberType]

    gradients()
    optimizer.step(1e-3)
    gradients()
    moments = [t for slot in optimizer.adamw.state.values() for t in slot.values() if t.ndim]
    masters = [m for n, m in optimizer.masters.items() if m is not optimizer.parameters[n]]
    grads = [m.grad for m in optimizer.masters.values() if m.grad is not None]
    held = sum(t.nbytes for t in [*optimizer.parameters.values(), *moments, *masters, *grads])
    assert held == each * count
    facts = read_model_facts(tmp_path / "model")
    assert facts is not None and facts.parameters == count
    assert price(facts, Layout(bytes_per_number=dtype.itemsize)).state == held


def test_parts_of_a_price_by_hand() -> None:
    n = SMALL.parameters or 0
    full = price(SMALL, Layout(2, ema=True, models=2, references=1, frozen_parameters=7))
    assert (full.weights, full.gradients, full.optimizer) == (4 * n, 8 * n, 32 * n)
    assert full.frozen == 2 * n + 14
    lora = adapter_numbers(SMALL, 8)
    # Queries and outputs of 256 × 256, keys and values of 256 × 128, three of 256 × 768; 8 rows in
    # and out, 6 layers.
    assert lora == 8 * 6 * (2 * 512 + 2 * 384 + 3 * 1024)
    adapter = price(SMALL, Layout(2, lora_rank=8))
    assert adapter.state == 2 * n + 16 * lora
    embedding = 2 * 4096 * 256
    assert copy_bytes(SMALL, 2, "nf4") == 2 * embedding + int(0.516 * (n - embedding))
    turns = price(SMALL, Layout(2, engines=1, kv_bytes=10**9, turns=True))
    assert turns.training == turns.state + turns.head and turns.sampling == 4 * n + 10**9
    assert (
        price(SMALL, Layout(2, engines=1, kv_bytes=10**9)).training
        == turns.training + 2 * n + 10**9
    )
    alone = price(SMALL, Layout(2, lora_rank=8, engines=1, turns=True, reserved_rank=16))
    assert alone.engine == 2 * n + 2 * 2 * lora and alone.training == adapter.training
    assert alone.host == adapter.host + int(1.1 * 2 * n)  # the base, while the policy trains
    swaps = price(SMALL, Layout(2, turns=True, swaps=True, host_copy=5))
    assert swaps.host == int(1.1 * 12 * n) + 5, "moments and masters wait there"
    there = Layout(2, references=1, frozen_parameters=3, offload_frozen=True, staying=7)
    assert price(SMALL, there).frozen == 7, "the rest comes to score"
    assert price(SMALL, Layout(2, trains=False)).peak == 2 * n
    assert price(SMALL, Layout(2, tokens=10)).activations == 10 * activation_bytes(SMALL, Layout(2))


def test_a_layer_saves_the_same_whether_or_not_it_is_sharded() -> None:
    """Joint products: four vectors of 256, three of queries and keys, three of 768; modules of a
    family without a lean form keep norms in both types and the activation."""
    for stage in (0, 1, 3):
        of = Layout(2, zero_stage=stage)
        assert layer_bytes(SMALL, of) == 2 * (4 * 256 + 3 * 256 + 3 * 128 + 3 * 768) + 4 * 6
        modules = 2 * 256 * 8 + 2 * (2 * 256 + 2 * 128 + 4 * 768) + 4 * 6
        assert layer_bytes(replace(SMALL, family="gpt2"), of) == modules
        assert layer_bytes(replace(SMALL, family="llama"), of) == layer_bytes(SMALL, of)


@pytest.mark.parametrize("said", ["system.kernels=liger", "system.compile=default"])
def test_faster_layers_keep_the_layout(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version", lambda _: "1.0.0")
    facts = on(A100, replace(QWEN_7B, family="qwen2"), memory=2000 * 10**9)
    facts = replace(facts, hardware=replace(facts.hardware, gpus=facts.hardware.gpus * 8))
    usual, faster = (resolved(SFTConfig, facts, *each) for each in ((), (said,)))
    assert faster.devices.zero_stage == usual.devices.zero_stage > 0
    assert faster.memory == usual.memory
    away = resolved(SFTConfig, facts, said, "system.zero_stage=3", "system.offload_parameters=true")
    assert away.memory.offload_parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [SFTConfig, RLConfig, DPOConfig, RMConfig, DistillConfig, RFTConfig]
)
@pytest.mark.parametrize("gpu", [A10G, A100, None])
def test_full_training_of_70b_fits_nowhere_and_it_says_so_at_once(
    kind: Any, gpu: Gpu | None
) -> None:
    text = refusal(kind, on(gpu, LLAMA_70B), *(["rft.threshold=1"] if kind is RFTConfig else []))
    assert "does not fit on" in text and "weights 141GB, gradients 282GB, optimizer 847GB" in text
    assert "system.device_memory" in text


@pytest.mark.parametrize(
    ("gpu", "model", "said", "remedy"),
    [
        (A100, QWEN_7B, [], "lora.rank = 16"),
        (A10G, QWEN_7B, [], "lora.rank = 16"),
        (A10G, replace(QWEN_7B, parameters=14_950_000_000), ["lora.rank=16", "model.dtype=float32"],
         'model.quantize = "int8"'),  # whose weights the host has no room for either
        (A100, LLAMA_70B, ["lora.rank=16"], 'model.quantize = "nf4"'),
        (A10G, LLAMA_70B, [], "B parameters at most"),
        (A100, replace(QWEN_7B, parameters=3_000_000_000), ["system.gradient_checkpointing=false",
         "system.offload_activations=false", "system.offload_optimizer=false", "longest"],
         "system.gradient_checkpointing = true"),
    ],
)  # fmt: skip
def test_the_nearest_that_fits_is_named(
    gpu: Gpu, model: ModelFacts, said: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", lambda _: object())
    longest = 7000 if "longest" in said else 1000
    text = refusal(
        SFTConfig, on(gpu, model, longest=longest), *(word for word in said if word != "longest")
    )
    assert remedy in text and f"{gpu.memory_free // GB}GB are free" in text


def test_what_is_named_fits() -> None:
    for said in ((), ("lora.rank=16",)):
        found = resolved(SFTConfig, on(A100, QWEN_7B), *(said or ("lora.rank=16",)))
        price_of = planned(found)
        assert price_of is not None and price_of.peak < 79 * GB
    assert resolved(SFTConfig, on(A100, replace(QWEN_7B, parameters=3 * 10**9)))
    assert resolved(GenerateConfig, on(A10G, QWEN_7B))
    assert "does not fit" in refusal(GenerateConfig, on(A10G, LLAMA_70B))


def test_more_memory_may_be_said_and_less() -> None:
    facts = on(A100, QWEN_7B)
    assert (
        resolved(SFTConfig, facts, 'system.device_memory="200GB"').settings[
            "system.max_tokens_per_microbatch"
        ]
        > 0
    )
    assert "20GB are free" in refusal(SFTConfig, facts, 'system.device_memory="20GB"')


def test_what_runs_today_is_not_refused() -> None:
    """Small models with little memory, models of unknown size, and what is short by less than the
    margin."""
    assert resolved(RLConfig, on(None, SMALL, memory=250_000_000))
    assert resolved(SFTConfig, on(None, replace(QWEN_7B, parameters=None)))
    state = price(SMALL, Layout(2, "cpu", tokens=1000)).peak
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d"])
    found = resolve(config, on(None, SMALL, memory=int(state / 1.05)))
    assert (
        any("may not fit" in note for note in found.notes)
        or found.settings["system.gradient_checkpointing"]
    )


def test_checkpointing_is_derived_for_as_few_layers_as_the_longest_sample_needs() -> None:
    three = replace(QWEN_7B, parameters=3_000_000_000)
    shares: list[float] = []
    for longest in (1000, 2048, 5000, 6000, 32_768):
        said = ("system.offload_activations=false", "system.offload_optimizer=false")
        found = resolved(SFTConfig, on(A100, three, longest=longest), *said)
        share = found.settings["system.gradient_checkpointing"]
        shares.append(float(share))
        assert found.settings["system.max_tokens_per_microbatch"] >= longest
        if not 0 < share < 1:
            continue
        again = round(share * 28)
        assert sum(recomputed(28, share)) == again
        fewer = found.with_memory(checkpointing=(again - 1) / 28)
        peaks = [planned(each) for each in (found, fewer)]
        assert peaks[0] and peaks[1] and peaks[0].peak <= LIMIT * 79 * GB
        assert peaks[0].activations < peaks[1].activations
    assert shares == sorted(shares) and shares[-1] > 0.9 and {*shares} - {0.0, 1.0}
    assert resolved(SFTConfig, on(None, SMALL)).settings["system.gradient_checkpointing"] is False


def test_a_share_is_derived_for_a_model_of_any_depth() -> None:
    """What is printed with three digits means the same number of layers."""
    for layers in range(1, 130):
        for again in range(1, layers):
            assert sum(recomputed(layers, round(again / layers, 3))) == again


def test_turns_are_taken_where_memory_is_short() -> None:
    small = replace(QWEN_7B, parameters=500_000_000)
    assert resolved(RLConfig, on(A100, small)).settings["system.hybrid"] is False
    large = on(A100, replace(small, parameters=3_500_000_000), memory=128 * GB)
    assert resolved(RLConfig, large).settings["system.hybrid"] is True
    assert resolved(RLConfig, on(None, SMALL)).settings["system.hybrid"] is False


def test_models_beside_the_policy_count() -> None:
    def peak(kind: Any, *said: str, **changes: Any) -> int:
        facts = on(A100, SMALL, **changes)
        found = planned(resolved(kind, facts, *said))
        assert found is not None
        return found.state

    n = SMALL.parameters or 0
    assert peak(RLConfig, "algorithm.name=ppo", "algorithm.kl=none") == 36 * n
    assert (
        peak(RLConfig, "algorithm.name=ppo", "algorithm.kl=none", "critic.shared_trunk=true")
        == 18 * n
    )
    assert peak(DPOConfig) == 20 * n and peak(DPOConfig, "dpo.precompute_reference=true") == 18 * n
    assert peak(DPOConfig, "lora.rank=8") == 2 * n + 16 * adapter_numbers(SMALL, 8)
    assert peak(DistillConfig, frozen_parameters=7) == 18 * n + 14
    assert peak(GenerateConfig) == 2 * n
    assert peak(RLConfig, "algorithm.kl.coef=0.1", "train.ema_decay=0.9") == 24 * n


def test_judges_and_drafts_are_counted_where_memory_is_divided() -> None:
    """Micro-batches and the KV cache share what they leave."""
    judge = {"judge_parameters": 7 * GB, "judge_kv": GB}
    for kind, said in ((RLConfig, "lora.rank=16"), (GenerateConfig, "sampling.n=64")):
        plan = resolved(kind, on(A100, QWEN_7B, **judge), said)
        found = planned(plan)
        assert found is not None
        assert found.frozen == 15 * GB and found.peak <= LIMIT * plan.free_memory
    plan = resolved(RLConfig, on(A100, QWEN_7B, draft=SMALL), "lora.rank=16")
    found = planned(plan)
    assert found is not None and found.frozen == 2 * 5_000_000
    tokens = 2 * 28 * 4 * 128 * 2 + 2 * 6 * 2 * 64 * 2
    assert request_kv(plan, QWEN_7B) == tokens * ((plan.training.longest or 0) + 64)


def test_what_waits_in_host_memory_has_to_fit_there() -> None:
    model = replace(QWEN_7B, parameters=3_000_000_000)
    told = refusal(RLConfig, on(A100, model, memory=32 * GB), "system.hybrid=true")
    assert "system.hybrid = true: this takes 39.6GB of host memory" in told
    assert not resolved(RLConfig, on(A100, model, memory=32 * GB)).devices.hybrid
    assert resolved(RLConfig, on(A100, model), "system.hybrid=true").devices.hybrid


def test_a_conversations_limit_is_that_of_its_samples() -> None:
    """Though a turn alone might be longer, it gets the room that is left."""
    said = ("environment.path=textarena:Game-v0", "rollout.max_new_tokens=3000")
    facts = on(None, SMALL, longest=100)
    plan = resolved(RLConfig, facts, *said, "environment.max_tokens=1000")
    assert plan.training.longest == 1000 <= (plan.memory.microbatch or 0) < 3000
    cap = "system.max_tokens_per_microbatch=999"
    told = refusal(RLConfig, facts, *said, "environment.max_tokens=1000", cap)
    assert "1000 tokens (environment.max_tokens)" in told


def test_the_table_names_every_part_and_what_is_free() -> None:
    facts = on(A100, SMALL)
    rows = dict(memory_rows(memory_of(resolved(RLConfig, facts))))
    assert rows["memory of each device"] == ["trainer's"]
    assert (
        rows["policy: weights"] == ["10MB"]
        and rows["policy: optimizer"] == ["60MB"]
        and rows["free"] == ["79GB"]
    )
    assert {
        "policy: gradients",
        "policy: activations of a micro-batch",
        "engines: keys and values",
    } <= rows.keys()
    two = replace(facts, hardware=replace(facts.hardware, gpus=(A100, A100)))
    apart = dict(memory_rows(memory_of(resolved(RLConfig, two, "system.hybrid=false"))))
    assert apart["memory of each device"] == ["trainer's", "engine's"]
    assert apart["engine: the engines' weights"] == ["", "10MB"]
    unknown = on(A100, replace(SMALL, parameters=None))
    assert memory_rows(memory_of(resolved(RLConfig, unknown))) == []


def test_the_command_shows_it(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text("")
    done = CliRunner().invoke(
        app, ["plan", str(tmp_path / "run.toml"), *sft_settings(tmp_path, model)]
    )
    assert done.exit_code == 0, done.output
    for words in (
        "memory of each",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "at most, at once",
        "free",
    ):
        assert words in done.output


@pytest.fixture
def cached_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hugging Face cache with a snapshot of org/m: its configuration, and no weights."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--m" / "refs").mkdir()
    (tmp_path / "models--org--m" / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    hub._hub_facts.cache_clear()
    yield snapshot
    hub._hub_facts.cache_clear()


def test_a_hub_models_facts_come_from_its_configuration(cached_hub: Path, tmp_path: Path) -> None:
    """Counted by formula, equal to what the weights of the same model hold; then by the index of
    its weights."""
    local = save_model(tmp_path / "local")
    (cached_hub / "config.json").write_text((local / "config.json").read_text())
    assert hub.known_model_facts("org/m") == hub.known_model_facts(str(local)) is not None
    hub._hub_facts.cache_clear()
    index = {"metadata": {"total_parameters": 12345, "total_size": 1}, "weight_map": {}}
    (cached_hub / "model.safetensors.index.json").write_text(json.dumps(index))
    found = hub.known_model_facts("org/m")
    assert found is not None and found.parameters == hub.known_parameters("org/m") == 12345


def test_a_hub_that_does_not_answer_leaves_the_size_unknown(
    cached_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cached_hub
    assert hub.known_model_facts("org/other") is None
    assert hub.known_model_facts("no hub name: at all") is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.get_hf_file_metadata", lambda *_, **__: __import__("time").sleep(30)
    )
    monkeypatch.setattr(hub, "PATIENCE", 0.01)
    assert hub.known_model_facts("org/another") is None


def test_a_remedy_goes_with_what_was_given() -> None:
    facts = on(A10G, QWEN_7B)
    assert "lora.rank = 16" in refusal(DPOConfig, facts)
    text = refusal(DPOConfig, facts, "system.offload_reference=true")
    assert "lora.rank = 16 and system.offload_reference = false" in text, (
        "an adapter needs no reference"
    )
    resolved(DPOConfig, facts, "lora.rank=16", "system.offload_reference=false")


def test_muon_saves_nothing_of_an_adapter_and_none_is_offered() -> None:
    plain, muon = (price(QWEN_7B, Layout(2, lora_rank=16, muon=flag)) for flag in (False, True))
    assert plain == muon and muon.optimizer == 8 * adapter_numbers(QWEN_7B, 16)
    assert "lora.rank" in refusal(SFTConfig, on(A10G, QWEN_7B))
    text = refusal(SFTConfig, on(A10G, QWEN_7B), "train.optimizer=muon")
    assert "does not fit" in text and "lora.rank" not in text


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"num_key_value_heads": 4}),
    ],
)
def test_the_formula_counts_as_the_weights_do(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = save_model(tmp_path / "model", family, hidden_size=64, head_dim=16, **options)
    facts = read_model_facts(path)
    assert facts is not None and facts.parameters is not None
    assert facts.estimated == pytest.approx(facts.parameters, rel=0.01)


@pytest.mark.parametrize(("gpu", "memory"), [(None, 22 * GB), (None, 24 * GB), (A10G, 500 * GB)])
def test_one_request_finds_memory_for_its_keys_and_values(gpu: Gpu | None, memory: int) -> None:
    """Also where it takes more than the quarter of the free memory that keys and values usually
    have."""
    facts = on(gpu, LLAMA_8B, memory, longest=4000)
    config = resolved(
        RLConfig, facts, "lora.rank=16", "rollout.max_new_tokens=2000", "system.hybrid=false"
    )
    numbers = 6000 * 2 * LLAMA_8B.layers * LLAMA_8B.kv_heads * LLAMA_8B.head_dim
    assert parse_size(config.settings["system.kv_memory"]) > (2 if gpu else 4) * numbers
    own = planned(config)
    assert own is not None and own.peak <= (LIMIT * gpu.memory_free if gpu else CPU_MARGIN * memory)


@pytest.mark.parametrize(
    ("family", "said", "kv", "prepared"),
    [
        ("qwen3", [], 2, 0),
        ("qwen3", ["system.compile=false"], 4, 8 * 5_000_000),
        ("qwen3", ["model.dtype=float32", "system.engine_weights=model"], 4, 8 * 5_000_000),
        ("qwen3", ["model.dtype=float16"], 4, 8 * 5_000_000),
        ("qwen3", ["lora.rank=8"], 2, 8 * 5_000_000),
        ("gpt2", [], 4, 8 * 5_000_000),
    ],
)
def test_keys_values_and_prepared_weights_of_an_engine_that_multiplies_tiles(
    family: str, said: list[str], kv: int, prepared: int
) -> None:
    """Compiled functions read keys and values of the model's type, and the weights as they are."""
    facts = on(None, replace(SMALL, family=family))
    facts = replace(facts, hardware=replace(facts.hardware, compiler="g++", tiles=True))
    config = resolved(RLConfig, facts, *said)
    needed = planned(config)
    assert needed is not None and needed.engine == prepared
    tokens = 1000 + config.settings["rollout.max_new_tokens"] + 64
    assert request_kv(config, SMALL) == 2 * 6 * 2 * 64 * kv * tokens
    older = replace(facts, hardware=replace(facts.hardware, tiles=False))
    other = planned(replace(config, facts=older))
    assert other is not None and other.engine == 8 * 5_000_000
    paired = replace(facts, hardware=replace(facts.hardware, tiles=False, pairs=True))
    pairs = planned(replace(config, facts=paired))
    assert pairs is not None and pairs.engine == (8 if prepared else 2) * 5_000_000


@pytest.mark.parametrize(
    ("machine", "each"), [({"tiles": True}, 2), ({"pairs": True}, 2), ({"tiles": False}, 4)]
)
def test_an_adapter_that_is_not_merged_decodes_beside_a_prepared_base(
    machine: dict[str, bool], each: int
) -> None:
    facts = on(None, replace(SMALL, family="qwen3", parameters=70_000_000))
    hardware = replace(facts.hardware, compiler="g++", bf16=True, **machine)
    config = resolved(RLConfig, replace(facts, hardware=hardware), "lora.rank=8")
    needed = planned(config)
    assert needed is not None and needed.engine == each * 70_000_000


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(
    ("weights", "dtype", "each"),
    [("float16", "float32", 2), ("int8", "float32", 1), ("int8", "bfloat16", 1)],
)
def test_rounded_weights_of_an_engine_are_counted(
    weights: str, dtype: str, each: int, tiles: bool
) -> None:
    """Of int8 with a scale of 4 bytes for each row of 256, beside the engine's copy of the model."""
    facts = on(None, replace(SMALL, family="qwen3"))
    facts = replace(facts, hardware=replace(facts.hardware, compiler="g++", tiles=tiles))
    said = (f"system.engine_weights={weights}", f"model.dtype={dtype}")
    scales = 5_000_000 // 64 if weights == "int8" else 0
    own = planned(resolved(RLConfig, facts, *said))
    assert own is not None and own.engine == each * 5_000_000 + scales
    apart = ("system.engine_process=true", "system.engines=1")
    adapted = planned(resolved(RLConfig, facts, *said, "lora.rank=4"))
    assert adapted is not None and adapted.engine == own.engine + 4 * 5_000_000  # it is merged
    with_copy = planned(resolved(RLConfig, facts, *said, *apart))
    assert with_copy is not None
    assert with_copy.engine - own.engine == (4 if dtype == "float32" else 2) * 5_000_000


@pytest.mark.parametrize(
    ("kind", "millions", "said", "weights"),
    [
        (RLConfig, 5, "", "float16"),
        (DistillConfig, 9, "", "float16"),
        (RLConfig, 4, "", "model"),  # 16 MB
        (RLConfig, 9, "lora.rank=4", "float16"),
        (RLConfig, 70, "lora.rank=4", "float16"),  # beside an adapter that is not merged
        (RLConfig, 1000, "", "float16"),
        (RLConfig, 9, "model.dtype=bfloat16", "model"),
        (RLConfig, 9, "system.compile=false", "model"),
        (RLConfig, 9, "system.engine_weights=model", "model"),
        (RLConfig, 9, "model.quantize=int8 lora.rank=4", "model"),
        (GenerateConfig, 9, "", "model"),
    ],
)
def test_a_run_that_trains_samples_with_half_of_the_bytes_that_it_waits_for(
    kind: Any, millions: int, said: str, weights: str
) -> None:
    facts = on(None, replace(SMALL, family="qwen3", parameters=millions * 1_000_000))
    machine = replace(facts.hardware, compiler="g++", bf16=False, memory_total=128 * 10**9)
    machine = replace(machine, memory_available=120 * 10**9)
    plan = resolved(kind, replace(facts, hardware=machine), *said.split())
    assert plan.devices.engine_weights == weights
    reasons = [entry.value for entry in plan.reasons if entry.key == "system.engine_weights"]
    assert reasons == ([] if weights == "model" else ["float16"])
    if weights == "float16":
        needed = planned(plan)
        merged = 4 if "lora" in said and millions < 68 else 0
        assert needed is not None and needed.engine == (2 + merged) * millions * 1_000_000


@pytest.mark.parametrize("kind", [RLConfig, DistillConfig])
def test_int8_is_corrected(kind: Any) -> None:
    facts = on(None, replace(SMALL, family="qwen3"))
    facts = replace(facts, hardware=replace(facts.hardware, compiler="g++"))
    found = {
        weights: resolved(kind, facts, f"system.engine_weights={weights}", "model.dtype=float32")
        for weights in ("model", "float16", "int8")
    }
    corrections = {
        weights: (plan.algorithm.correction.name, plan.algorithm.decoupled)
        for weights, plan in found.items()
    }
    usual = ("none", False)
    assert corrections == {"model": usual, "float16": usual, "int8": ("token_truncate", True)}
    reason = next(r for r in found["int8"].reasons if r.key == "algorithm.correction")
    assert "system.engine_weights" in reason.reason
    said = ["system.engine_weights=int8", "model.dtype=float32", "algorithm.correction=icepop"]
    assert resolved(kind, facts, *said).algorithm.correction.name == "icepop"


def test_a_head_of_another_width_is_copied_for_tiles() -> None:
    facts = on(None, replace(SMALL, family="qwen3", vocab_size=4097))
    facts = replace(facts, hardware=replace(facts.hardware, compiler="g++", tiles=True))
    needed = planned(resolved(RLConfig, facts))
    assert needed is not None and needed.engine == 8 * 5_000_000
    facts = replace(
        facts, hardware=replace(facts.hardware, tiles=False, pairs=True)
    )  # which any width is made of
    needed = planned(resolved(RLConfig, facts))
    assert needed is not None and needed.engine == 2 * 5_000_000


@pytest.mark.parametrize(("rope", "lean"), [({}, True), ({"partial_rotary_factor": 0.75}, False)])
def test_a_model_that_rotates_in_part_runs_no_compiled_functions(
    rope: dict[str, float], lean: bool
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    for config in (
        {**sizes, **rope},
        {**sizes, "rope_parameters": {"rope_type": "default", **rope}},
    ):
        facts = facts_of({"model_type": "phi3", **config})
        assert facts is not None and facts.lean is lean


@pytest.mark.parametrize(("prompt", "new"), [(1000, 500), (1, 1), (33, 17)])
def test_memory_for_less_than_one_request_is_refused_as_the_engine_would(
    prompt: int, new: int
) -> None:
    facts = on(None, SMALL, longest=prompt)
    layout = KVLayout(
        SMALL.layers, SMALL.kv_heads, SMALL.head_dim, torch.float32, torch.device("cpu")
    )
    pool = KVPool([layout], 10**6)
    blocks = pool.needed(prompt) + pool.needed(max(1, new - 1))
    size = blocks * pool.block_size * layout.token_bytes
    said = (f"rollout.max_new_tokens={new}", "system.engine_process=false")
    config = resolved(RLConfig, facts, *said, f"system.kv_memory={size}B")
    assert KVPool([layout], parse_size(config.settings["system.kv_memory"])).blocks == blocks
    words = refusal(RLConfig, facts, *said, f"system.kv_memory={size - 1}B")
    assert "system.kv_memory" in words and str(prompt) in words


def test_memory_for_less_than_a_conversation_is_refused_as_the_engine_would() -> None:
    """Wherever in a block its last turn begins."""
    facts = on(None, SMALL, longest=100)
    layout = KVLayout(
        SMALL.layers, SMALL.kv_heads, SMALL.head_dim, torch.float32, torch.device("cpu")
    )
    pool = KVPool([layout], 10**6)
    turns = [(500 - new, new) for new in range(1, 51)]
    blocks = max(pool.needed(prompt) + pool.needed(max(1, new - 1)) for prompt, new in turns)
    size = blocks * pool.block_size * layout.token_bytes
    said = ("rollout.max_new_tokens=50", "system.engine_process=false")
    said += ('environment.command="play"', "environment.max_tokens=500")
    assert resolved(RLConfig, facts, *said, f"system.kv_memory={size}B")
    words = refusal(RLConfig, facts, *said, f"system.kv_memory={size - 1}B")
    assert "system.kv_memory" in words and "environment.max_tokens" in words and "500" in words


@pytest.mark.parametrize(
    ("kind", "gpu", "said", "size"),
    [
        (RLConfig, A100, ("lora.rank=8",), 66),
        (RLConfig, A100, ("lora.rank=8", "system.hybrid=false"), 62),
        (GenerateConfig, A10G, (), 10),
    ],
)
def test_keys_and_values_that_were_said_have_to_fit_a_gpu(
    kind: Any, gpu: Gpu, said: tuple[str, ...], size: int
) -> None:
    """An engine allocates them at once; half of them fits."""
    facts = on(gpu, QWEN_7B)
    words = refusal(kind, facts, *said, f"system.kv_memory={size}GB")
    assert f'hat fits: system.kv_memory = "{500 * size}MB"' in words
    half = planned(resolved(kind, facts, *said, f"system.kv_memory={500 * size}MB"))
    assert half is not None and half.kv == size * GB // 2


def test_activations_may_fill_the_host_memory_that_the_optimizer_leaves() -> None:
    away = ("system.offload_optimizer=true", "system.offload_activations=true")
    plan = resolved(SFTConfig, on(A100, QWEN_7B, memory=300 * GB), *away)

    def host(tokens: int) -> int:
        needed = planned(plan.with_memory(microbatch=tokens))
        assert needed is not None
        return needed.host

    state = 2 * host(2000) - host(4000)
    left = 0.95 * 300 * GB - state
    assert state > 16 * (QWEN_7B.parameters or 0)
    assert host(int(host_tokens(plan, QWEN_7B))) - state == pytest.approx(left, rel=1e-3)


def test_experts_are_counted_under_each_familys_name() -> None:
    """DeepSeek-V3 has 671 billion parameters."""
    config = {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
    }
    facts = facts_of(config)
    assert facts is not None and facts.estimated == pytest.approx(671e9, rel=0.06)


def test_weights_in_a_second_layout_are_not_counted(tmp_path: Path) -> None:
    one = save_model(tmp_path / "one")
    facts = read_model_facts(one)
    shutil.copy(one / "model.safetensors", one / "consolidated.safetensors")
    assert facts is not None and facts == read_model_facts(one)
    names = names_in(one / "model.safetensors")
    (one / "model.safetensors").rename(one / "part.safetensors")
    index = one / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    assert read_model_facts(one) == facts and WeightFiles(one).names == set(names)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json"):
        read_model_facts(one)


def test_every_step_says_what_memory_it_took_and_how_fast_it_was(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    runs = (
        assembly.run_sft(None, sft_settings(tmp_path, model, train__steps=1)),
        assembly.run_rl(None, rl_settings(tmp_path, model, train__steps=1)),
    )
    sft, rl = (read_metrics(run.run_dir / "metrics.jsonl")[0] for run in runs)
    for line, count in ((sft, sft["samples"]), (rl, rl["rollouts"])):
        assert line["memory/host_peak"] > 10**8
        busy = line["seconds"] - line["seconds/setup"] - line.get("seconds/checkpoint", 0.0)
        assert line["samples_per_second"] == pytest.approx(count / busy, rel=0.01)
    assert sft["samples"] == 8 and rl["rollouts"] == 16
    assert 0 < rl["kv_used"] <= 1 and rl["kv_peak"] > 0


@pytest.mark.slow
def test_the_table_of_gpus_agrees_with_what_a_run_is_refused_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the page says yes, the run resolves; and full training is refused where it says no
    by more than half."""
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", lambda _: object())
    ways = {
        "full": ["system.offload_optimizer=false"],
        "LoRA": ["lora.rank=16"],
        "QLoRA (nf4)": ["lora.rank=16", "model.quantize=nf4"],
    }
    for gpu, memory in GPUS.items():
        card = Gpu(gpu, int(memory), int(memory), (7, 5) if gpu == "T4" else (9, 0))
        for model in MODELS.values():
            for way, said in ways.items():
                facts = on(card, model, longest=TOKENS)
                if fits(model, WAYS[way], gpu):
                    dtype = "float16" if gpu == "T4" else "bfloat16"
                    assert resolved(SFTConfig, facts, *said).settings["model.dtype"] == dtype
                elif way == "full" and needed(model, WAYS[way]) > 1.5 * memory:
                    assert "does not fit" in refusal(SFTConfig, facts, *said)


def test_the_peak_of_a_program_is_not_that_of_the_one_that_started_it() -> None:
    shown = (
        "from tunesmith.records.memory import memory_metrics as m; print(m()['memory/host_peak'])"
    )
    child = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, check=True
    )
    assert 10**6 < float(child.stdout) < memory_metrics()["memory/host_peak"] / 2
