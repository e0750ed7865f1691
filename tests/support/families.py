"""Models of every family, with gradients to compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunesmith.models.causal_lm import CausalLM

WINDOW = 6  # shorter than the prompt, so that completions look back past their parent
SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    },
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 7,
    },
    "vaultgemma": {"head_dim": 8, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"num_hidden_layers": 5},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {
        "logit_scale": 0.3,
        "sliding_window": WINDOW,
        "num_hidden_layers": 5,
        "head_dim": 8,
    },
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "granitemoe": {"logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "olmo3": {"sliding_window": WINDOW, "num_hidden_layers": 5},
    "exaone4": {"sliding_window": WINDOW, "num_hidden_layers": 5},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ministral": {"sliding_window": WINDOW, "head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "arcee": {"head_dim": 8},
    "cwm": {"head_dim": 8, "sliding_window": WINDOW},
    "gpt2": {"n_inner": 64},
}


def gradients(model: CausalLM, logprobs: Tensor) -> dict[str, Tensor]:
    model.module.zero_grad()
    (logprobs * torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}


def assert_same_gradients(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float
) -> None:
    assert got.keys() == want.keys()
    scale = max(float(g.norm()) for g in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= tolerance * max(
            float(gradient.norm()), 1e-2 * scale
        ), name
