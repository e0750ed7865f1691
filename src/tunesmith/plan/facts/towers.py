"""Sizes of a tower that sees images, from its model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.plan.facts.families import family
from tunesmith.plan.facts.layers import Written, first


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """A vision transformer, and the projector that makes rows of features of its patches."""

    layers: int
    hidden_size: int
    intermediate_size: int
    patches: int
    """How many patches make one row of features."""
    projectors: int = 1
    """How many make features: one, and those for the decoder's first layers (DeepStack)."""
    joins: bool = True
    """Whether a projector joins the patches of a row; otherwise it takes their mean."""
    gated: bool = False
    """Feed-forward networks have three matrices."""
    quick: bool = False
    """Their activation is QuickGELU, which saves its sigmoid too."""
    whole: int = 0
    """Layers whose attention spans the whole image; those of others see ``window`` patches."""
    window: int = 0
    pixels: int = 0
    """Numbers of one patch."""

    @property
    def block(self) -> int:
        """Weights of a layer's matrices."""
        inner = (3 if self.gated else 2) * self.intermediate_size
        return self.hidden_size * (4 * self.hidden_size + inner)

    def projector(self, width: int) -> int:
        """Parameters of all projectors to features of a width."""
        if not self.joins:
            return self.hidden_size * (width + 1)
        joined = self.patches * self.hidden_size
        return self.projectors * (joined * (joined + width + 1) + width + 2 * self.hidden_size)

    def operations(self, rows: float) -> float:
        """Operations of a forward pass over an image, per row of its ``rows`` of features."""
        seen = self.whole * rows * self.patches + (self.layers - self.whole) * self.window
        return self.patches * (2 * self.layers * self.block + 4 * self.hidden_size * seen)


def tower_of(whole: Written) -> TowerSizes | None:
    """The tower in a model's configuration; None: it has none, or leaves its sizes out."""
    vision: Any = whole.get("vision_config")
    if not family(whole.get("model_type")).images or not isinstance(vision, Mapping):
        return None
    hidden = first(vision, "embed_dim", "hidden_size")
    inner = first(vision, "intermediate_size") or hidden * first(vision, "mlp_ratio")
    layers = first(vision, "depth", "num_hidden_layers")
    if not (hidden and inner and layers):
        return None
    square = first(vision, "image_size")
    side = first(vision, "patch_size")
    if whole.get("model_type") == "gemma3":
        rows = first(whole, "mm_tokens_per_image") or 256
        patches = (square or 896) // (side or 14)
        merged = patches**2 // rows
        pixels = 3 * (side or 14) ** 2
        return TowerSizes(layers, hidden, inner, merged, joins=False, whole=layers, pixels=pixels)
    merged = (first(vision, "spatial_merge_size") or 2) ** 2
    deep = len(vision.get("deepstack_visual_indexes") or ())
    pixels = 3 * (first(vision, "temporal_patch_size") or 2) * (side or 14) ** 2
    sizes = TowerSizes(layers, hidden, inner, merged, 1 + deep, whole=layers, pixels=pixels)
    if whole.get("model_type") != "qwen2_5_vl":
        return replace(sizes, quick=whole.get("model_type") == "qwen2_vl")
    window = ((first(vision, "window_size") or 112) // (side or 14)) ** 2
    full = len(vision.get("fullatt_block_indexes") or (7, 15, 23, 31))
    return replace(sizes, gated=True, whole=min(layers, full), window=window)
