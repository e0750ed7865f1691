"""Whether a Hugging Face architecture works on a token forest, from ``families.toml`` and a model's
configuration.

In an architecture that is not listed there, packed sequences may silently see each other.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from tunesmith.errors import ModelError, nearest

_TABLES = tomllib.loads(
    files("tunesmith.models").joinpath("families.toml").read_text(encoding="utf-8")
)
KNOWN = frozenset(_TABLES["supported"].split())
REFUSED = {
    name: str(entry["reason"]) for entry in _TABLES["refused"] for name in entry["names"].split()
}
"""Architecture → the reason why it is not supported."""


@dataclass(frozen=True, slots=True)
class LayerFields:
    """What a family's layers do that neither their modules nor its configuration say."""

    norm_offset: bool = False
    """The weights of norms are offsets from one, applied before rounding."""
    softcap: bool = False
    """Attention applies the configuration's soft cap."""
    one_window: bool = False
    """All layers have the configuration's window; otherwise each attention module has its own."""
    rotary_by_kind: bool = False
    """Local and global layers have different rotary tables."""


def layer_fields(model_type: str) -> LayerFields:
    return LayerFields(**_TABLES["layers"].get(model_type, {}))


def check_family(config: Any) -> None:
    """Refuse a model by its configuration, before weights load.

    Raises:
        ModelError: with the architecture, the reason and families that work.
    """
    reason = refusal(config)
    if reason:
        raise ModelError(
            f"architecture '{config.model_type}' cannot be trained here: {reason}. "
            "Choose a model of another family, such as Llama, Qwen, Mistral, Gemma, Phi or SmolLM"
        )


def refusal(config: Any) -> str | None:
    """The reason why a model is not supported; None if it is."""
    name = str(config.model_type)
    if name in REFUSED:
        return REFUSED[name]
    if getattr(config, "is_encoder_decoder", False):
        return "it is not a decoder-only language model"
    if name not in KNOWN:
        return f"it has not been shown to give the same results on packed sequences.{nearest(name, KNOWN)}"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention lets tokens see later ones"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn bypasses the Hugging Face attention interface"
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}; only full and sliding attention run on a forest"
    return None
