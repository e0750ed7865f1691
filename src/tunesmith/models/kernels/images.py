"""Features of images in a decoder's pass.

Shape legend: ``T`` tokens, ``n`` rows of images among them, ``d`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Features of some rows of images, or of one image with all of its rows."""

    embedded: Tensor
    """``[n, d]``, in the place of embeddings."""
    deep: tuple[Tensor, ...] = ()
    """``[n, d]`` each, added after the decoder's first layers (DeepStack)."""

    def map(self, change: Callable[[Tensor], Tensor]) -> ImageFeatures:
        return ImageFeatures(change(self.embedded), tuple(change(rows) for rows in self.deep))

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (self.embedded, *self.deep))


@dataclass(frozen=True, slots=True)
class SeenImages:
    """The rows of images among the tokens of a pass."""

    places: Tensor
    """``[n]``, where they are among the tokens."""
    features: ImageFeatures

    def put(self, embedded: Tensor) -> Tensor:
        """Embeddings ``[T, d]`` with the features in their places."""
        return embedded.index_copy(0, self.places, self.features.embedded.to(embedded.dtype))

    def add_after(self, layer: int, x: Tensor) -> Tensor:
        """``[T, d]`` after a layer, with the features that are added there."""
        if layer >= len(self.features.deep):
            return x
        return x.index_add(0, self.places, self.features.deep[layer].to(x.dtype))
