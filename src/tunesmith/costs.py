"""Floating-point operations of training and of a forward pass, the minimum duration of the latter,
and the vocabulary head's tiles.

Packing, metering and planning all use these costs.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of logits computed at a time; on a CPU they should stay in the cache until they are
used."""
WORDS = {"cpu": 4096, "cuda": 32768}
"""Vocabulary tokens whose logits are computed at a time."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Training operations: ``linear`` per token, ``quadratic`` per query-key pair, ``head`` per
    token in the loss."""

    linear: float = 1.0
    quadratic: float = 0.0
    head: float = 0.0

    @classmethod
    def of_decoder(
        cls,
        *,
        parameters: int,
        layers: int,
        heads: int,
        head_dim: int,
        vocabulary: int,
        hidden: int,
    ) -> CostModel:
        """Forward and backward: three products per weight, each a multiplication and an addition.

        Args:
            parameters: the number of parameters without embeddings.
        """
        return cls(6.0 * parameters, 12.0 * layers * heads * head_dim, 6.0 * vocabulary * hidden)

    def prefix(self, tokens: int) -> float:
        """Cost of the first ``tokens`` tokens of a sequence, without the head."""
        return self.linear * tokens + self.quadratic * tokens * (tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class PeakRates:
    """The rates that a device attains in large matrix products and in memory access."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Bytes read and operations computed by one forward pass of a decoder."""

    weight_bytes: int
    """Bytes of every parameter that a token passes through, including the head but not the
    embedding table."""
    weights: int
    kv_bytes: int
    """Bytes per token, over all layers."""
    attention_flops: int
    """Operations per query-key pair, over all layers: ``4 * layers * heads * head_dim``."""

    def seconds(self, rates: PeakRates, tokens: int, kv_read: int, pairs: int) -> float:
        """Minimum time of a pass over ``tokens`` new tokens that reads the keys and values of
        ``kv_read`` others."""
        read = self.weight_bytes + self.kv_bytes * kv_read
        flops = 2 * self.weights * tokens + self.attention_flops * pairs
        return max(read / rates.bytes_per_second, flops / rates.flops_per_second)


def chunk_words(vocabulary: int, device: str) -> int:
    """The number of vocabulary tokens whose logits are computed at a time."""
    return min(vocabulary, WORDS.get(device, WORDS["cuda"]))


def chunk_rows(vocabulary: int, device: str) -> int:
    """The number of rows whose float32 logits for these tokens take ``CHUNK_BYTES``."""
    return CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * chunk_words(vocabulary, device))
