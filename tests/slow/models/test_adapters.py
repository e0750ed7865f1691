"""Adapters as peft writes them, merged or continued, against peft's own logits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.families import SPECIAL, logprobs, one_at_a_time, samples
from tests.support.peft_adapters import TOKENS, WRITTEN, Written, logits_of, write
from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.config.reading.files import adapter_directory
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ConfigError, ModelError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run import assembly
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Sample, Sampling

QUICK = ("rank_pattern", "embedding", "head", "both new, tied", "tokens", "more tokens")
CASES = [
    pytest.param(
        name,
        tied,
        marks=[] if name in QUICK and (tied or name == "embedding") else pytest.mark.slow,
    )
    for name in WRITTEN
    for tied in (False, True)
]


def predicted(logits: Tensor) -> Tensor:
    """The log-probability of each token after the first."""
    return logits.log_softmax(-1)[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]


def ours(model: CausalLM) -> tuple[Tensor, float]:
    """The same from a packed forest, and that of the local engine's next token, which is the
    likeliest."""
    forest = build_forest(Batch.of([Sample(TOKENS, [False] + [True] * (len(TOKENS) - 1))]))
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=4, max_prefill_tokens=64)
    completion = asyncio.run(engine.generate(TOKENS, Sampling(max_new_tokens=1, temperature=0)))
    with torch.no_grad():
        return model.predict(forest).logprobs, completion.logprobs[0]


def same(model: CausalLM, logits: Tensor) -> None:
    logprobs, following = ours(model)
    torch.testing.assert_close(logprobs, predicted(logits), rtol=0, atol=1e-4)
    assert following == pytest.approx(logits[-1].log_softmax(-1).max().item(), abs=1e-4)


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_merged_or_continued_it_is_what_peft_computes(
    tmp_path: Path, name: str, tied: bool
) -> None:
    written = WRITTEN[name]
    logits = write(tmp_path, written, tied=tied)
    assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), logits, rtol=0, atol=1e-4)
    merged = CausalLM.load(tmp_path / "merged")
    same(merged, logits)
    weights = load_file(tmp_path / "merged/model.safetensors")
    assert (
        any(key.startswith("lm_head") for key in weights)
        != merged.module.config.tie_word_embeddings
    )
    model = CausalLM.load(tmp_path / "model")
    if written.trains:
        adapters.attach(model, LoraSection(), path=tmp_path / "adapter", frozen=True)
        same(model, logits)
        return
    with pytest.raises(ModelError) as refused:
        adapters.attach(model, LoraSection(), path=tmp_path / "adapter")
    assert written.refused in str(refused.value) and str(tmp_path / "adapter") in str(refused.value)
    assert "tunesmith merge" in str(refused.value)


def test_every_setting_of_peft_is_continued_or_refused() -> None:
    """A setting that peft adds is refused until someone has looked at it."""
    assert adapters.beyond_plain(LoraConfig(r=4, target_modules=["q_proj"])) == []
    for key, value in {
        "use_qalora": True,
        "layer_replication": [(0, 1)],
        "lora_bias": True,
    }.items():
        assert adapters.beyond_plain(LoraConfig(**{key: value})) == [key]
    config: Any = LoraConfig()
    config.lora_bias = "of a later version"
    assert adapters.beyond_plain(config) == ["lora_bias"]


def test_what_cannot_be_merged_is_refused_with_the_key(tmp_path: Path) -> None:
    q = {"target_modules": ["q_proj"]}
    for name, config, words in (
        ("invoked", {**q, "alora_invocation_tokens": [5, 9]}, "alora_invocation_tokens"),
        ("bias", {**q, "lora_bias": True}, "lora_bias=True"),
    ):
        write(tmp_path / name, Written(config), tied=False)
        with pytest.raises(ModelError) as refused:
            assembly.run_merge(tmp_path / name / "adapter", tmp_path / "merged")
        assert words in str(refused.value) and "download" not in str(refused.value)
        assert not (tmp_path / "merged").exists()


def test_a_file_that_is_not_the_configuration_s_is_named(tmp_path: Path) -> None:
    write(tmp_path, WRITTEN["two modules"], tied=False)
    file = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    first = sorted(weights)[0]
    for changed, named in (
        ({key: value for key, value in weights.items() if key != first}, first),
        ({**weights, "base_model.model.other.weight": torch.zeros(1)}, "other.weight"),
    ):
        save_file(changed, file)
        for use in ("merge", "continue"):
            with pytest.raises(ModelError) as refused:
                if use == "merge":
                    assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")
                else:
                    adapters.attach(
                        CausalLM.load(tmp_path / "model"), LoraSection(), path=tmp_path / "adapter"
                    )
            assert named in str(refused.value) and str(file) in str(refused.value)
    file.write_bytes(b"\x00" * 7)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")


def test_an_embedding_in_the_file_counts_only_if_it_differs_from_the_base_s(tmp_path: Path) -> None:
    """``save_embedding_layers`` writes it whether or not it was trained."""
    logits = write(tmp_path, WRITTEN["two modules"], tied=True)
    file = tmp_path / "adapter/adapter_model.safetensors"
    embedding = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    key = "base_model.model.model.embed_tokens.weight"
    save_file({**load_file(file), key: embedding}, file)
    model = CausalLM.load(tmp_path / "model")
    adapters.attach(model, LoraSection(), path=tmp_path / "adapter")
    same(model, logits)
    save_file({**load_file(file), key: embedding * 2}, file)
    with pytest.raises(ModelError, match=r"embed_tokens.*tunesmith merge"):
        adapters.attach(CausalLM.load(tmp_path / "model"), LoraSection(), path=tmp_path / "adapter")


def test_an_adapter_in_a_folder_of_its_name_is_found_and_pickled_ones_are_refused(
    tmp_path: Path,
) -> None:
    logits = write(tmp_path, WRITTEN["two modules"], tied=False, name="polite")
    assert adapter_directory(tmp_path / "adapter") == tmp_path / "adapter/polite"
    assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), logits, rtol=0, atol=1e-4)
    other = tmp_path / "adapter/curt"
    other.mkdir()
    (other / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ConfigError, match=r"curt, polite"):
        adapter_directory(tmp_path / "adapter")
    file = tmp_path / "adapter/polite/adapter_model.safetensors"
    torch.save(load_file(file), file.with_name("adapter_model.bin"))
    file.rename(file.with_name("model.safetensors"))  # another file of this kind is not the adapter
    with pytest.raises(ConfigError, match=r"adapter_model\.bin"):
        adapter_directory(file.parent)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "laguna", "qwen2_moe", "qwen3_next"])
def test_an_adapter_on_a_mixture_is_what_others_load(tmp_path: Path, model_type: str) -> None:
    """In some families peft takes the names of shared and dense networks for stacked experts, or
    does not find them again; merged weights compute as the adapter does."""
    path = save_model(tmp_path / "model", model_type, **SPECIAL[model_type])
    model = CausalLM.load(path)
    adapter = adapters.attach(model, LoraSection(rank=4))
    names = [name for name, part in model.module.named_modules() if isinstance(part, LoraLayer)]
    assert any(name.endswith(("q_proj", "q_b_proj")) for name in names)
    assert not any(".experts" in name for name in names)
    shared = any(".shared_expert." in name for name in names)
    assert shared == (model_type == "qwen2_moe")
    with torch.no_grad():
        for _, weight in adapter.own_weights():
            weight.add_(torch.randn_like(weight) * 0.05)
    forest = forest_of(samples())
    want = logprobs(model, forest)[0]
    plain = CausalLM.load(path)
    plain.module.load_state_dict(dict(adapter.merged_weights()))
    torch.testing.assert_close(logprobs(plain, forest)[0], want, rtol=0, atol=1e-4)
    model.save(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(path)
    other = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(one_at_a_time(other, samples(), 1.0), want, rtol=0, atol=1e-4)
    if not shared:
        with pytest.raises(ConfigError, match="routed experts"):
            adapters.attach(CausalLM.load(path), LoraSection(rank=4, targets=("down_proj",)))


def test_weights_that_peft_does_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "model", "laguna", **SPECIAL["laguna"])
    model = CausalLM.load(path)
    monkeypatch.setattr(adapters, "_LEFT_OUT", {})
    adapters.attach(model, LoraSection(rank=4))
    model.save(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"did not read .*shared_experts"):
        assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")
