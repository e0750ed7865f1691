"""The size of pinned memory: torch rounds each piece up to a power of two (``models.host_memory``)."""

from __future__ import annotations

from tunesmith.plan.facts import ModelFacts

PINNED = 1.1
"""Upper bound of the host memory allocated per byte of tensors that are packed into a few pieces."""


def rounded_up(model: ModelFacts, shards: int) -> float:
    """Memory allocated per byte of a layer's float32 gradients if each matrix's rows are one piece, as in FSDP.

    Args:
        shards: number of ranks that share the rows.
    """
    queries, keys, inner = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.intermediate_size
    sizes = [max(1, 4 * model.hidden_size * width // shards) for width in (queries, queries, keys, keys, *[inner] * 3)]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)
