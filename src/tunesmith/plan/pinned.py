"""What memory takes that a GPU reaches itself: torch rounds a piece up to a power of two (``models.host_memory``)."""

from __future__ import annotations

from tunesmith.plan.facts import ModelFacts

PINNED = 1.1
"""Host memory that is taken for tensors that are packed into few pieces, at most: of each byte."""


def rounded_up(model: ModelFacts, shards: int) -> float:
    """What is taken of each byte of a layer's float32 gradients where each matrix's rows are a piece, as FSDP has them.

    Args:
        shards: ranks that share the rows.
    """
    queries, keys, inner = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.intermediate_size
    sizes = [max(1, 4 * model.hidden_size * width // shards) for width in (queries, queries, keys, keys, *[inner] * 3)]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)
