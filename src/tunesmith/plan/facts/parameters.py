"""How many parameters a decoder has, and how many of them a token passes through, from its
configuration: for models without files to count in.

Biases and the norms within attention are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tunesmith.plan.facts.families import Family
from tunesmith.plan.facts.layers import CARRYING, Mixer, Written, first

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
ALONE = ("mlp", "moe")
"""Kinds of layers that are only a feed-forward network, in families that have these."""
Matrix = tuple[int, int]
"""The inputs and outputs of a linear module."""


class Sizes(NamedTuple):
    """The sizes of a decoder that ``ModelFacts`` has too."""

    layers: Sequence[str]
    """The kind of each."""
    hidden: int
    inner: int
    queries: int
    keys: int
    mixer: Mixer
    outside: int
    """Parameters of embedding and head."""


class Counts(NamedTuple):
    total: int
    idle: int
    """Parameters of experts that a token does not pass through."""
    routed: int = 0
    """Parameters of all experts among which routers choose."""
    mixtures: int = 0
    """Layers with such experts."""
    inner: int = 0
    """The feed-forward width of one of them that a token passes through."""
    widths: int = 0
    """Inputs plus outputs of all linear modules within the layers: the numbers of an adapter per
    unit of its rank."""


def count(config: Written, sizes: Sizes, family: Family) -> Counts:
    """The parameters of a decoder with these sizes."""
    total = sizes.outside + _positions(config, sizes, family) + sizes.hidden
    idle = 0
    routed = 0
    mixtures = 0
    inner = 0
    widths = 0
    narrow = first(config, "hidden_size_per_layer_input")
    apart = not set(ALONE).isdisjoint(sizes.layers)
    for index, kind in enumerate(sizes.layers):
        total += sizes.hidden if apart else 2 * sizes.hidden
        if kind not in ALONE:
            mixing = [*_mixing(config, index, sizes, family)]
            total += _numbers(mixing)
            widths += _widths(mixing)
        if kind in CARRYING:
            total += sizes.mixer.window
        if narrow:
            reading = [(sizes.hidden, narrow), (narrow, sizes.hidden)]
            total += _numbers(reading)
            widths += _widths(reading)
        if apart and kind not in ALONE:
            continue
        sparse = kind == "moe" if apart else _is_sparse(config, index)
        whole = _experts(config, sizes, family) if sparse else _dense(config, index, sizes, family)
        total += whole.total
        idle += whole.idle
        routed += whole.routed
        mixtures += whole.mixtures
        inner = max(inner, whole.inner)
        widths += whole.widths
    return Counts(total, idle, routed, mixtures, inner, widths)


def _numbers(matrices: Iterable[Matrix]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def _widths(matrices: Iterable[Matrix]) -> int:
    return sum(inputs + outputs for inputs, outputs in matrices)


def _positions(config: Written, sizes: Sizes, family: Family) -> int:
    """The parameters of embeddings other than the tokens': of positions, and of tokens for each
    layer."""
    learned = first(config, "max_position_embeddings", "n_positions")
    positions = learned * sizes.hidden if family.learned_positions else 0
    by_layer = first(config, "hidden_size_per_layer_input") * len(sizes.layers)
    return positions + by_layer * (first(config, "vocab_size_per_layer_input") + sizes.hidden)


def _mixing(config: Written, index: int, sizes: Sizes, family: Family) -> Iterator[Matrix]:
    """The matrices of a layer's attention, and of its mixer with a state."""
    kind = sizes.layers[index]
    hidden = sizes.hidden
    if kind in CARRYING:
        yield from sizes.mixer.matrices(hidden)
    if kind in CARRYING and kind != "hybrid":
        return
    if first(config, "kv_lora_rank"):
        yield from _latent_attention(config, sizes)
    elif family.wide_global and kind == "full_attention":
        yield from _global_attention(config, index, sizes)
    else:
        gate = sizes.queries if family.output_gate else 0
        keys = sizes.keys * (2 if family.doubled_local and kind == "sliding_attention" else 1)
        yield hidden, sizes.queries + gate
        if not _borrows_keys(config, index, sizes):
            yield hidden, keys
            yield hidden, _of_values(config, keys)
        yield _of_values(config, sizes.queries), hidden


def _of_values(config: Written, width: int) -> int:
    """The width of values beside keys, or of outputs beside queries, of a width."""
    values = first(config, "v_head_dim")
    return width * values // config["head_dim"] if values else width


def _borrows_keys(config: Written, index: int, sizes: Sizes) -> bool:
    """Whether a layer attends to the keys and values of an earlier one."""
    return index >= len(sizes.layers) - first(config, "num_kv_shared_layers")


def _global_attention(config: Written, index: int, sizes: Sizes) -> Iterator[Matrix]:
    """The matrices of attention with heads that are wider than those of local layers; its values
    may be its keys."""
    queries = config["num_attention_heads"] * config["global_head_dim"]
    yield sizes.hidden, queries
    if not _borrows_keys(config, index, sizes):
        matrices = 1 if config.get("attention_k_eq_v") else 2
        yield from matrices * [(sizes.hidden, global_key_width(config))]
    yield queries, sizes.hidden


def global_key_width(config: Written) -> int:
    """Width of the keys of all heads in layers with full attention, where these are wider."""
    heads = first(config, "num_global_key_value_heads") if config.get("attention_k_eq_v") else 0
    return (heads or first(config, "num_key_value_heads")) * first(config, "global_head_dim")


def _latent_attention(config: Written, sizes: Sizes) -> Iterator[Matrix]:
    """The matrices of attention whose keys and values, and perhaps queries, are made from a narrow
    latent."""
    hidden = sizes.hidden
    latent = config["kv_lora_rank"]
    rotated = config["qk_rope_head_dim"]
    heads = sizes.queries // (config["qk_nope_head_dim"] + rotated)
    values = heads * config["v_head_dim"]
    width = first(config, "q_lora_rank")
    if width:
        yield hidden, width
    yield width or hidden, sizes.queries
    yield hidden, latent + rotated
    yield latent, heads * config["qk_nope_head_dim"] + values
    yield values, hidden


def _dense(config: Written, index: int, sizes: Sizes, family: Family) -> Counts:
    inner = first(config, "shared_intermediate_size", "intermediate_size_mlp") or sizes.inner
    if config.get("use_double_wide_mlp") and _borrows_keys(config, index, sizes):
        inner *= 2
    if first(config, "block_multiple_of") and config.get("block_auto_adjust_ff_dim", True):
        multiple = config["block_multiple_of"]
        scaled = int(config.get("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
        inner = -(-scaled // multiple) * multiple
    matrices = _matrices(family) * [(sizes.hidden, inner)]
    return Counts(_numbers(matrices), 0, widths=_widths(matrices))


def _experts(config: Written, sizes: Sizes, family: Family) -> Counts:
    hidden = sizes.hidden
    experts = first(config, *EXPERTS)
    inner = first(config, "moe_intermediate_size") or sizes.inner
    width = first(config, "moe_latent_size") or hidden
    each = _matrices(family) * width * inner
    shared = first(config, *SHARED) or (
        first(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        * (first(config, "moe_shared_expert_intermediate_size") or inner)
    )
    if family.dense_beside_experts:
        shared = sizes.inner
    beside = _matrices(family) * [(hidden, shared)] if shared else []
    if first(config, "shared_expert_intermediate_size"):
        beside.append((hidden, 1))  # its gate
    total = experts * (each + hidden) + _numbers(beside)
    chosen = chosen_experts(config)
    idle = (experts - chosen) * each
    inner = chosen * inner + shared
    return Counts(total, idle, experts * each, 1, inner, _widths(beside))


def chosen_experts(config: Written) -> int:
    """How many experts of a layer a token passes through; the most, if that differs by layer."""
    value = next((config[name] for name in CHOSEN if config.get(name)), 0)
    return max(value) if isinstance(value, list) else value


def _is_sparse(config: Written, layer: int) -> bool:
    """Whether the feed-forward network of a layer is a mixture of experts."""
    if not first(config, *EXPERTS):
        return False
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[layer] in ("sparse", "moe")
    chosen = config.get("moe_layers")
    if isinstance(chosen, list):
        return layer in chosen
    dense = first(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    if "expert_layer_period" in config:
        several = first(config, *EXPERTS) > 1
        return several and layer % config["expert_layer_period"] == config["expert_layer_offset"]
    names = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
    step = first(config, *names) or 1
    alone: Sequence[int] = config.get("mlp_only_layers") or ()
    return layer >= dense and (layer + 1) % step == 0 and layer not in alone


def _matrices(family: Family) -> int:
    return 3 if family.gated else 2
