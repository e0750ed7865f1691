"""Which layers of a model attend, and the states that the others carry from token to token, from
its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

Written = Mapping[str, Any]
"""A ``config.json``."""
ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")
CARRYING = ("linear_attention", "mamba", "conv", "hybrid")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Nemotron-H writes one letter per layer."""


def layer_kinds(config: Written, layers: int) -> Sequence[str]:
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
    if family == "jamba":
        every = first(config, "attn_layer_period") or 8
        offset = first(config, "attn_layer_offset")
        return ["attention" if i % every == offset else "mamba" for i in range(layers)]
    if family == "bamba":
        attending = config.get("attn_layer_indices") or ()
        return ["attention" if i in attending else "mamba" for i in range(layers)]
    if family in ("lfm2", "lfm2_moe") and isinstance(config.get("full_attn_idxs"), list):
        return ["attention" if i in config["full_attn_idxs"] else "conv" for i in range(layers)]
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"):
        every = config.get("full_attention_interval", 4)
        return ["attention" if (i + 1) % every == 0 else "mamba" for i in range(layers)]
    if family == "kimi_linear":
        attending = (config.get("linear_attn_config") or {}).get("full_attn_layers")
        if isinstance(attending, list):  # counted from one
            return ["attention" if i + 1 in attending else "mamba" for i in range(layers)]
        return ["attention" if i and i % 4 == 0 else "mamba" for i in range(layers)]
    if family == "gemma4_text":
        kinds = ["sliding_attention"] * layers
        for i in range(5, layers, 6):
            kinds[i] = "full_attention"
        return [*kinds[:-1], "full_attention"]
    return ["attention"] * layers


def narrows(config: Written, layers: int) -> bool:
    """Whether some layers see a window or a chunk of the tokens before, if their configuration
    says so."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
    # Qwen's families write a window beside the key that leaves it out, which is off by default.
    window = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    starts = config.get("max_window_layers") or 0
    return bool(
        first(config, "attention_chunk_size")
        or (first(config, "sliding_window") and window and starts < layers)
    )


class Mixer(NamedTuple):
    """Sizes of a layer's mixer that carries a state."""

    width: int = 0
    """Outputs of its projections, per token."""
    window: int = 0
    """Numbers of the inputs of its convolution that it keeps per sequence."""
    memory: int = 0
    """Numbers that its recurrence remembers per sequence."""
    out: int = 0
    """Inputs of its output projection."""
    between: int = 0
    """Inputs of the second products of its two low-rank gates, or of other products among its
    channels; 0: it has none."""
    parts: int = 1
    """Products that have ``width`` outputs together."""

    def matrices(self, hidden: int) -> Iterator[tuple[int, int]]:
        """The inputs and outputs of its linear modules."""
        yield hidden, self.width - (self.parts - 1)
        yield from (self.parts - 1) * [(hidden, 1)]
        yield self.out, hidden
        if self.between:
            yield from 2 * [(self.between, self.out)]


NO_MIXER = Mixer()


def mixer_of(config: Written, hidden: int) -> Mixer:
    """The sizes of a model's mixers; zero for a family that says nothing."""
    if "linear_num_value_heads" in config:
        return _delta_net(config)
    if config.get("model_type") == "kimi_linear":
        return _delta_attention(config)
    if "conv_L_cache" in config:
        return Mixer(3 * hidden, (config["conv_L_cache"] - 1) * hidden, out=hidden)
    if first(config, "mamba_n_heads", "mamba_num_heads"):
        return _state_space(config, hidden)
    if config.get("model_type") == "jamba":
        return _selective_scan(config, hidden)
    return NO_MIXER


def _delta_net(config: Written) -> Mixer:
    key = config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * key + values
    window = (config["linear_conv_kernel_dim"] - 1) * channels
    # Qwen3-Next has joined them, and OLMo divided them further than Qwen3.5.
    parts = {"qwen3_next": 2, "olmo_hybrid": 6}.get(str(config.get("model_type")), 4)
    return Mixer(channels + values + 2 * heads, window, key * values, values, parts=parts)


def _delta_attention(config: Written) -> Mixer:
    """A delta net that forgets by channel, with two gates of the rank of a head."""
    written: Written = config.get("linear_attn_config") or {}
    head = first(written, "head_dim") or first(config, "linear_head_dim") or 128
    heads = first(written, "num_heads") or first(config, "linear_num_heads") or 32
    kernel = first(written, "short_conv_kernel_size") or first(config, "linear_conv_kernel_dim")
    values = heads * head
    window = ((kernel or 4) - 1) * 3 * values
    return Mixer(3 * values + heads + 2 * head, window, head * values, values, head, parts=6)


def _state_space(config: Written, hidden: int) -> Mixer:
    heads = first(config, "mamba_n_heads", "mamba_num_heads")
    size = first(config, "mamba_d_head", "mamba_head_dim")
    inner = heads * size or config.get("mamba_expand", 2) * hidden  # a size may be "auto"
    state = first(config, "mamba_d_state", "ssm_state_size")
    groups = first(config, "mamba_n_groups", "n_groups") or 1
    channels = inner + 2 * groups * state
    window = ((first(config, "mamba_d_conv", "conv_kernel") or 4) - 1) * channels
    return Mixer(channels + inner + heads, window, inner * state, inner)


def _selective_scan(config: Written, hidden: int) -> Mixer:
    """Mamba, whose steps come from a narrow product of the channels."""
    inner = (first(config, "mamba_expand") or 2) * hidden
    state = first(config, "mamba_d_state") or 16
    narrow = first(config, "mamba_dt_rank") or ceil(hidden / 16)  # it may be "auto"
    window = ((first(config, "mamba_d_conv") or 4) - 1) * inner
    # With the rates of the state: twice so many numbers for each channel.
    return Mixer(2 * inner, window, inner * state, inner, narrow + 3 * state // 2, parts=1)


def first(config: Written, *names: str) -> int:
    """The first of these entries that is a whole number; 0 if none is."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)
