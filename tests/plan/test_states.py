"""Models whose layers carry a state: their configurations as published, what engines keep of them,
and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.support import tiny
from tests.support.families import SPECIAL, build
from tunesmith.models.attention import ATTENTION_NAME, ForestAttention
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Segment
from tunesmith.plan.cost.activations import layer_bytes
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.layers import layer_kinds
from tunesmith.plan.facts.model import facts_of
from tunesmith.run.engines.local.runner import probe

SIZES = {"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 151936}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
}
STATEFUL = [
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
]


@pytest.mark.parametrize("model_type", STATEFUL)
def test_facts_are_those_of_the_module(model_type: str, tmp_path: Any) -> None:
    """From ``config.json``: layers with keys and values, and the size of the states."""
    assert model_type in families()
    path = tiny.save_model(tmp_path, model_type, **SPECIAL[model_type])
    config = AutoConfig.from_pretrained(path)
    facts = facts_of(config.to_dict())
    assert facts is not None
    layout, _ = probe(CausalLM.load(path), compiled=False)
    assert facts.attention_layers == layout.layers
    assert facts.kv_bytes_per_token(4) == layout.token_bytes
    assert facts.state_bytes == layout.state_bytes


@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        ({"hybrid_override_pattern": "M-M*E"}, ["mamba", "mlp", "mamba", "attention", "moe"]),
        (
            {"model_type": "qwen3_next", "full_attention_interval": 3},
            ["mamba", "mamba", "attention", "mamba", "mamba"],
        ),
        (
            {"model_type": "bamba", "attn_layer_indices": [1]},
            ["mamba", "attention", "mamba", "mamba", "mamba"],
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": [0, 4]},
            ["attention", "conv", "conv", "conv", "attention"],
        ),
        ({"model_type": "falcon_h1"}, ["hybrid"] * 5),
        ({"model_type": "llama"}, ["attention"] * 5),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"] * 5},
            ["sliding_attention"] * 5,
        ),
    ],
)
def test_layers_as_published(written: dict[str, Any], kinds: list[str]) -> None:
    assert list(layer_kinds(written, 5)) == kinds


def test_bytes_by_hand() -> None:
    """Qwen3-Next-80B-A3B: 36 of 48 layers have 32 heads of 128 × 128, and windows of 3 × 8192."""
    config = {
        **SIZES,
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    }
    facts = facts_of(config)
    assert facts is not None
    assert facts.attention_layers == 12
    assert facts.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert facts.kv_bytes_per_token(2) == 2 * 12 * 2 * 256 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_what_a_layer_saves_is_planned(kind: str, dtype: torch.dtype) -> None:
    """And at most half more than that."""
    known = {*SPECIAL[kind], *tiny.SMALL}
    sizes = {**SPECIAL[kind], **{name: size for name, size in WIDE.items() if name in known}}
    carrying = next(each for each in sizes["layer_types"] if each != "full_attention")
    saved: list[float] = []
    for layers in (1, 2):
        types = ["full_attention"] + [carrying] * layers
        model = build(
            kind, dtype, **{**sizes, "num_hidden_layers": len(types), "layer_types": types}
        )
        model.module.set_attn_implementation(ATTENTION_NAME)
        saved.append((saved_bytes(model, 256) - saved_bytes(model, 128)) / 128)
    facts = facts_of(model.module.config.to_dict())
    assert facts is not None
    planned = layer_bytes(facts, Layout(bytes_per_number=dtype.itemsize))
    assert saved[1] - saved[0] <= planned <= 1.5 * (saved[1] - saved[0])


def saved_bytes(model: CausalLM, tokens: int) -> int:
    """Of all storages that the layers save for the backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(5, 290, (tokens,))
    attention = ForestAttention([Segment(0, tokens, -1)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(ids, torch.arange(tokens), attention)
    return sum(storage.nbytes() for storage in kept.values())
