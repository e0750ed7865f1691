"""Whether a Hugging Face architecture works on a token forest, from ``families.toml`` and a model's
configuration.

In an architecture that is not listed there, packed sequences may silently see each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.config.doors import Door
from tunesmith.errors import ModelError, nearest
from tunesmith.records.toml import table_beside

_TABLES = table_beside(__file__, "families.toml")
OURS: Mapping[str, Mapping[str, bool]] = _TABLES["trained"]
DOOR = Door[Mapping[str, Mapping[str, bool]]]("families", "tunesmith.plan.facts.families:OURS")
"""Tables of families, each with its fields; other packages add theirs."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLES["defaults"]
"""What published configurations leave out, by architecture."""
REFUSED = {
    name: str(entry["reason"]) for entry in _TABLES["refused"] for name in entry["names"].split()
}
"""Architecture → the reason why it is not supported, unless somebody has added it."""
LEAN_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""Of the layers that run as a few large operations (``kernels.lean``), in a configuration."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_BY_TOKEN = ("mlp", "moe", "dense", "sparse")
"""Kinds of layers that see one token at a time."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the layers of a family that is trained do, beside what its configuration says."""

    lean: bool = False
    """Its layers run as a few large operations (``kernels.lean``)."""
    head_norms: bool = False
    """Queries and keys always have norms; in other families ``use_qk_norm`` says so."""
    norm_offset: bool = False
    """The weights of norms are offsets from one, applied before rounding."""
    softcap: bool = False
    """Attention applies the configuration's soft cap."""
    one_window: bool = False
    """All layers have the configuration's window; otherwise each attention module has its own."""
    gated: bool = True
    """Feed-forward networks have three matrices: gate, up and down; otherwise up and down."""
    clamped_gate: bool = False
    """Gate and up are clamped, and one is added to up, each in an operation of its own."""
    output_gate: bool = False
    """Queries have a gate beside them, for the outputs of attention."""
    learned_positions: bool = False
    """There is an embedding of positions."""
    rotary_by_kind: bool = False
    """Local and global layers have different rotary tables."""
    wide_global: bool = False
    """Heads of layers with full attention are wider than those of layers with a window."""
    doubled_local: bool = False
    """Layers with a window have twice the key/value heads of those with full attention."""
    dense_beside_experts: bool = False
    """A dense network stands beside the experts of a layer, as a shared expert does."""
    multimodal: bool = False
    """Its text decoder, which is of another family, stands beside towers for images or sound."""
    images: bool = False
    """Its tower sees the images of the data; otherwise its text decoder alone is trained."""
    both_ways: bool = False
    """The tokens of an image see each other, and not only those before them."""
    inner: bool = False
    """The family exists only inside a multimodal model."""


def families() -> dict[str, Family]:
    """The families that are trained, by architecture."""
    return {name: Family(**fields) for name, fields in _fields().items()}


def published() -> list[str]:
    """The families that models have in their ``config.json``, in order."""
    return sorted(name for name, each in families().items() if not each.inner)


def family_around(decoder: str | None) -> Family:
    """The fields of the published architecture with this decoder; its own, if that is the whole
    model."""
    return family(str(decoder).removesuffix("_text"))


def seeing() -> list[str]:
    """The families whose models see images, in order."""
    return sorted(name for name, each in families().items() if each.images)


def family(model_type: str | None) -> Family:
    """An architecture's fields; those of no family, if it is not trained."""
    name = str(model_type)
    tables = (table for table in reversed(DOOR.rooms) if name in table)
    return Family(**next((table[name] for table in tables), {}))


def _fields() -> dict[str, Mapping[str, bool]]:
    return {name: fields for table in DOOR.rooms for name, fields in table.items()}


def check_family(config: Any, layer_types: Collection[str] = ()) -> None:
    """Refuse a model by its configuration, before weights load.

    Args:
        layer_types: kinds of layers that run on a forest, beside full and sliding attention and
            those that see one token at a time.

    Raises:
        ModelError: with the architecture, the reason and families that work.
    """
    reason = _refusal(config, layer_types)
    if reason:
        raise ModelError(
            f"architecture '{config.model_type}' cannot be trained here: {reason}. "
            "Choose a model of another family, such as Llama, Qwen, Mistral, Gemma, Phi or SmolLM"
        )


def _refusal(config: Any, layer_types: Collection[str]) -> str | None:
    """The reason why a model is not supported; None if it is."""
    name = str(config.model_type)
    known = _fields()
    if name in REFUSED and name not in known:
        return REFUSED[name]
    if known.get(name, {}).get("multimodal"):
        inner = _refusal(config.get_text_config(), layer_types)
        return inner and f"of its text decoder, '{config.get_text_config().model_type}': {inner}"
    if getattr(config, "is_encoder_decoder", False):
        return "it is not a decoder-only language model"
    if name not in known:
        others = nearest(name, known)
        return f"it has not been shown to give the same results on packed sequences.{others}"
    if getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision"):
        return "use_bidirectional_attention lets tokens see later ones"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn bypasses the Hugging Face attention interface"
    running = {*_ATTENTION, *_BY_TOKEN, *layer_types}
    kinds = set(getattr(config, "layer_types", None) or ()) - running
    if kinds:
        return (
            f"it has layers of kind {', '.join(sorted(kinds))}; only {', '.join(sorted(running))} "
            "run on a forest"
        )
    return None
