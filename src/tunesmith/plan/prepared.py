"""Weights that the local engine prepares on a CPU for products with few rows."""

from __future__ import annotations

SMALL = 64 << 20
"""Maximum parameters of a model whose adapter a CPU merges into a float32 copy to decode."""


def prepared_bytes(numbers: int, memory_total: int, copied: int | None = None) -> int:
    """An upper bound on the bytes of weights that the local engine prepares on a CPU (``engines.local.decode_model``).

    Prepared weights have 16 or 32 bits; those of a small model may be a copy of a float32 copy. If they would take more
    than an eighth of the machine's memory, nothing is prepared.

    Args:
        copied: bytes per weight if one kind of product serves all shapes.
    """
    needed = (copied or (8 if numbers <= SMALL else 4)) * numbers
    return needed if needed <= memory_total // 8 else 0
