"""What a run costs in operations: of training, and of a forward pass, with its least seconds.

Packing, metering and planning all read their prices here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations of a training micro-batch: ``linear`` per token, ``quadratic`` per pair of query and key, ``head`` per
    token in the loss."""

    linear: float = 1.0
    quadratic: float = 0.0
    head: float = 0.0

    @classmethod
    def of_decoder(
        cls, *, parameters: int, layers: int, heads: int, head_dim: int, vocabulary: int, hidden: int
    ) -> CostModel:
        """Forward and backward: three products per weight, each a multiplication and an addition.

        Args:
            parameters: without embeddings.
        """
        return cls(6.0 * parameters, 12.0 * layers * heads * head_dim, 6.0 * vocabulary * hidden)

    def prefix(self, tokens: int) -> float:
        """Cost of the first ``tokens`` tokens of a sequence, without the head."""
        return self.linear * tokens + self.quadratic * tokens * (tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class PeakRates:
    """What a device attains in large matrix products, and in reading and writing memory."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Bytes that one forward pass of a decoder reads, and what it computes."""

    weight_bytes: int
    """Of every parameter that a token passes through: the head is included, the embedding table is not."""
    weights: int
    kv_bytes: int
    """Per token, all layers."""
    attention_flops: int
    """Per pair of query and key, all layers: ``4 * layers * heads * head_dim``."""

    def seconds(self, rates: PeakRates, tokens: int, kv_read: int, pairs: int) -> float:
        """The least time of a pass over ``tokens`` new tokens that reads the keys and values of ``kv_read`` others."""
        read = self.weight_bytes + self.kv_bytes * kv_read
        flops = 2 * self.weights * tokens + self.attention_flops * pairs
        return max(read / rates.bytes_per_second, flops / rates.flops_per_second)
