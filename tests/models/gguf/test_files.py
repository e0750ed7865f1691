"""What is written as GGUF is read back as it was; what llama.cpp computes in another way is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tests.support import tiny, tiny_gguf
from tunesmith.errors import ModelError, StorageError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.gguf.package import read_weight
from tunesmith.models.gguf.reading import unpacked
from tunesmith.models.gguf.writing import export_gguf
from tunesmith.plan.facts.gguf import read_header
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.facts.model import read_model_facts

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def edited(directory: Path, **values: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


@pytest.mark.parametrize("family", tiny_gguf.FAMILIES)
def test_a_family_is_read_back_as_it_was(family: str, tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", family)
    export_gguf(str(source), tmp_path / "model.gguf", "f32")
    directory = unpacked(tmp_path / "model.gguf")
    before = weights(source)
    after = weights(directory)
    assert after.keys() == before.keys()
    for name, weight in before.items():  # norms of gemma lose what one more cannot hold
        assert torch.allclose(after[name], weight, rtol=0, atol=1e-7), name
        assert torch.equal(after[name], weight) or "norm" in name
    facts = known_model_facts(str(tmp_path / "model.gguf"))
    assert facts is not None and facts.parameters == sum(w.numel() for w in before.values())
    ours = AutoConfig.from_pretrained(directory).to_dict()
    theirs = AutoConfig.from_pretrained(source).to_dict()
    kind = "llama" if family == "mistral" else family
    assert ours["model_type"] == kind and directory != source
    for name in ("rope_parameters", "rms_norm_eps", "layer_types", "tie_word_embeddings"):
        assert ours.get(name) == theirs.get(name), name
    assert read_model_facts(directory) == facts


def test_number_formats(tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", "qwen3")
    name = "blk.1.ffn_down.weight"
    weight = weights(source)["model.layers.1.mlp.down_proj.weight"]
    read = {}
    for form in ("f16", "bf16", "q8_0"):
        export_gguf(str(source), tmp_path / form, form)
        read[form] = read_weight(read_header(tmp_path / form), name)
        norm = read_weight(read_header(tmp_path / form), "blk.0.attn_norm.weight")
        assert norm.dtype == torch.float32
    assert torch.equal(read["f16"], weight.half())
    assert torch.equal(read["bf16"], weight.bfloat16())
    step = weight.view(-1, 32).abs().amax(1, keepdim=True) / 127
    error = (read["q8_0"].view(-1, 32) - weight.view(-1, 32)).abs()
    assert (error <= 0.51 * step + 1e-3 * weight.view(-1, 32).abs()).all()


def test_rows_that_are_no_whole_blocks_are_halves(tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", "llama", intermediate_size=48)
    export_gguf(str(source), tmp_path / "out", "q8_0")
    pieces = read_header(tmp_path / "out").pieces
    assert pieces["blk.0.ffn_down.weight"].kind == 1  # rows of 48 numbers
    assert pieces["blk.0.ffn_up.weight"].kind == 8


def test_scaled_frequencies(tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", head_dim=32, rope_parameters=tiny_gguf.LLAMA3)
    export_gguf(str(source), tmp_path / "model.gguf", "f32")
    header = read_header(tmp_path / "model.gguf")
    factors = read_weight(header, "rope_freqs.weight")
    module = CausalLM.load(source).module.model.rotary_emb
    plain = 1 / 10_000.0 ** (torch.arange(0, 32, 2) / 32)
    assert torch.allclose(plain / factors, module.inv_freq, rtol=1e-6)
    read = AutoConfig.from_pretrained(unpacked(tmp_path / "model.gguf")).rope_parameters
    assert read == tiny_gguf.LLAMA3


def test_what_ends_a_completion(tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model")
    GenerationConfig(eos_token_id=[4, 2]).save_pretrained(source)
    export_gguf(str(source), tmp_path / "model.gguf", "f32")
    values = read_header(tmp_path / "model.gguf").values
    assert values["tokenizer.ggml.eos_token_id"] == 2
    assert values["tokenizer.ggml.eot_token_id"] == 4
    directory = unpacked(tmp_path / "model.gguf")
    assert GenerationConfig.from_pretrained(directory).eos_token_id == [2, 4]
    GenerationConfig(eos_token_id=[4, 2, 7, 8]).save_pretrained(source)
    with pytest.raises(ModelError, match="4 tokens"):
        export_gguf(str(source), tmp_path / "other", "f32")


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
         "dynamic"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("gemma3_text", {"query_pre_attn_scalar": 17}, "query_pre_attn_scalar"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "layer_types"),
    ],
)  # fmt: skip
def test_what_llama_cpp_computes_in_another_way(
    family: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = edited(tiny_gguf.save(tmp_path / "model", family), **values)
    with pytest.raises(ModelError, match=said):
        export_gguf(str(source), tmp_path / "out", "f16")
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "neox", "gpt_neox")
    with pytest.raises(ModelError, match=r"gpt_neox.*valid: llama"):
        export_gguf(str(other), tmp_path / "out", "f16")
    source = tiny_gguf.save(tmp_path / "model")
    (tmp_path / "there").touch()
    with pytest.raises(StorageError, match="there exists"):
        export_gguf(str(source), tmp_path / "there", "f16")
    with pytest.raises(ModelError, match="without merges"):
        export_gguf(str(tiny.save_model(tmp_path / "bytes")), tmp_path / "out", "f16")


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model")
    large = {name: weight * 1e6 for name, weight in weights(source).items()}
    save_file(large, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"which f16 cannot; valid: bf16"):
        export_gguf(str(source), tmp_path / "out", "f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("name", tiny_gguf.SPLITTINGS)
def test_byte_pairs_are_read_back(name: str, tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", tokenizer=tiny_gguf.byte_pairs(name))
    check_tokenizer(source, tmp_path / "model.gguf", name)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_read_back(prefix: bool, tmp_path: Path) -> None:
    tokenizer = tiny_gguf.pieces(prefix=prefix)
    source = tiny_gguf.save(tmp_path / "model", tokenizer=tokenizer)
    check_tokenizer(source, tmp_path / "model.gguf", "default")


def check_tokenizer(source: Path, file: Path, pre: str) -> None:
    export_gguf(str(source), file, "f32")
    assert read_header(file).values["tokenizer.ggml.pre"] == pre
    before = AutoTokenizer.from_pretrained(source)
    after = AutoTokenizer.from_pretrained(unpacked(file))
    text = f"<|im_start|>user\n{tiny_gguf.TEXT}<tool><|im_end|>"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    assert after.chat_template == before.chat_template
    assert after.special_tokens_map.items() >= {
        (name, before.special_tokens_map[name]) for name in ("bos_token", "eos_token", "pad_token")
    }


def test_pieces_whose_merges_are_not_all_there(tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", tokenizer=tiny_gguf.pieces(prefix=True))
    path = source / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["merges"].pop()
    path.write_text(json.dumps(described))
    with pytest.raises(ModelError, match="SentencePiece"):
        export_gguf(str(source), tmp_path / "out", "f16")


def test_unknown_splitting(tmp_path: Path) -> None:
    tokenizer = tiny_gguf.byte_pairs("qwen2")
    source = tiny_gguf.save(tmp_path / "model", tokenizer=tokenizer)
    path = source / "tokenizer.json"
    path.write_text(path.read_text().replace("|\\\\p{N}|", "|\\\\p{N}{1,7}|"))
    with pytest.raises(ModelError, match=r"1,7.*valid: .*qwen2"):
        export_gguf(str(source), tmp_path / "out", "f16")
