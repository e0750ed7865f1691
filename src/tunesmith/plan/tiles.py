"""The tiles of logits that the vocabulary head computes at a time."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Logits that are computed at a time. On a CPU they should stay in the cache until they are used."""
WORDS = {"cpu": 4096, "cuda": 32768}
"""Of the vocabulary, whose logits are computed at a time."""


def chunk_words(vocabulary: int, device: str) -> int:
    """Words whose logits are computed at a time."""
    return min(vocabulary, WORDS.get(device, WORDS["cuda"]))


def chunk_rows(vocabulary: int, device: str) -> int:
    """Rows whose float32 logits of these words take ``CHUNK_BYTES``."""
    return CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * chunk_words(vocabulary, device))
