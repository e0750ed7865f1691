"""Which layers of a model attend, and the states that the others carry from token to token, from
its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ATTENDING = ("full_attention", "sliding_attention", "attention", "hybrid")
CARRYING = ("linear_attention", "mamba", "conv", "hybrid")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Nemotron-H writes one letter per layer."""


def layer_kinds(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """The kind of each layer; those of a family that says nothing attend."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_PATTERN.get(letter, letter) for letter in pattern]
    family = config.get("model_type")
    if family == "falcon_h1":
        return ["hybrid"] * layers
    attending = config.get("attn_layer_indices", config.get("full_attn_idxs"))
    if family in ("bamba", "lfm2", "lfm2_moe") and isinstance(attending, list):
        return ["attention" if i in attending else "conv" for i in range(layers)]
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"):
        every = config.get("full_attention_interval", 4)
        return ["attention" if (i + 1) % every == 0 else "mamba" for i in range(layers)]
    return ["attention"] * layers


def state_numbers(config: Mapping[str, Any], hidden: int) -> int:
    """Numbers of the state that one layer carries per sequence: inputs of its convolution, and what
    its recurrence remembers."""
    if "linear_num_value_heads" in config:  # a delta net
        key = config["linear_key_head_dim"]
        value = config["linear_value_head_dim"]
        heads = config["linear_num_value_heads"]
        channels = 2 * config["linear_num_key_heads"] * key + heads * value
        return (config["linear_conv_kernel_dim"] - 1) * channels + heads * key * value
    if "conv_L_cache" in config:  # a short convolution
        return (config["conv_L_cache"] - 1) * hidden
    heads = _first(config, "mamba_n_heads", "mamba_num_heads")
    if not heads:
        return 0
    size = _first(config, "mamba_d_head", "mamba_head_dim")
    state = _first(config, "mamba_d_state", "ssm_state_size")
    groups = _first(config, "mamba_n_groups", "n_groups") or 1
    width = _first(config, "mamba_d_conv", "conv_kernel") or 4
    if not size:  # "auto"
        size = config.get("mamba_expand", 2) * hidden // heads
    channels = heads * size + 2 * groups * state
    return (width - 1) * channels + heads * size * state


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int)), 0)
