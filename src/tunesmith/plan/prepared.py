"""Weights that the local engine prepares on a CPU for products of few rows."""

from __future__ import annotations

SMALL = 64 << 20
"""Numbers of a model that a CPU decodes in float32 too, if few rows are faster so."""


def prepared_bytes(numbers: int, memory_total: int, copied: int | None = None) -> int:
    """At most what the local engine prepares of its weights on a CPU (``engines.local.decode_model``).

    They are in 16 or 32 bits, of a small model and of a head in both. They are not worth an eighth of the
    machine's memory: of a model for which they would take more nothing is prepared.

    Args:
        copied: bytes per weight where one kind of product serves all.
    """
    needed = (copied or (8 if numbers <= SMALL else 4)) * numbers
    return needed if needed <= memory_total // 8 else 0
