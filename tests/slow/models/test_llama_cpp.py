"""llama.cpp samples from our files what transformers samples from the model."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import tiny_gguf
from tunesmith.models.gguf.splitting import SPLITTINGS
from tunesmith.models.gguf.writing import export_gguf

llama_cpp: Any = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the package gguf is not installed")
TOKENS = 24
FLOAT32 = 0
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


def llama(file: Path) -> Any:
    return llama_cpp.Llama(
        str(file), n_ctx=256, n_threads=1, verbose=False, type_k=FLOAT32, type_v=FLOAT32
    )


@pytest.mark.parametrize(
    ("family", "settings", "form"),
    [
        *((family, {}, "f32") for family in tiny_gguf.FAMILIES),
        *((family, {}, "f16") for family in tiny_gguf.FAMILIES),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "f32"),
        ("llama", {"head_dim": 32, "rope_parameters": tiny_gguf.LLAMA3}, "f32"),
        ("qwen3", {"rope_parameters": YARN}, "f32"),
        ("qwen2", {"rope_parameters": LINEAR}, "f32"),
    ],
)
def test_greedy_tokens(family: str, settings: dict[str, Any], form: Any, tmp_path: Path) -> None:
    source = tiny_gguf.save(tmp_path / "model", family, **settings)
    export_gguf(str(source), tmp_path / "model.gguf", form)
    model = AutoModelForCausalLM.from_pretrained(source)
    ids = AutoTokenizer.from_pretrained(source)(tiny_gguf.TEXT)["input_ids"]
    whole = model.generate(
        torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    loaded = llama(tmp_path / "model.gguf")
    sampled = loaded.generate(ids, temp=0.0, repeat_penalty=1.0)
    assert [*islice(sampled, TOKENS)] == whole[0, len(ids) :].tolist()
    loaded.close()


@pytest.mark.parametrize("name", [*SPLITTINGS, "pieces", "pieces after a space"])
def test_tokens_of_a_text(name: str, tmp_path: Path) -> None:
    tokenizer = (
        tiny_gguf.byte_pairs(name)
        if name in SPLITTINGS
        else tiny_gguf.pieces(prefix=name != "pieces")
    )
    source = tiny_gguf.save(tmp_path / "model", tokenizer=tokenizer)
    export_gguf(str(source), tmp_path / "model.gguf", "q8_0")
    loaded = llama(tmp_path / "model.gguf")
    for text in (tiny_gguf.TEXT, f"<|im_start|>user\n{tiny_gguf.TEXT}<tool>11<|im_end|>"):
        theirs = loaded.tokenize(text.encode(), add_bos=True, special=True)
        assert theirs == tokenizer(text)["input_ids"]
    assert loaded.metadata["tokenizer.chat_template"] == tokenizer.chat_template
    loaded.close()
