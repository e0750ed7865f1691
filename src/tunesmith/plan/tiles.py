"""The tiles of logits that the vocabulary head computes at a time."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of logits computed at a time; on a CPU they should stay in the cache until they are used."""
WORDS = {"cpu": 4096, "cuda": 32768}
"""Vocabulary tokens whose logits are computed at a time."""


def chunk_words(vocabulary: int, device: str) -> int:
    """The number of vocabulary tokens whose logits are computed at a time."""
    return min(vocabulary, WORDS.get(device, WORDS["cuda"]))


def chunk_rows(vocabulary: int, device: str) -> int:
    """The number of rows whose float32 logits for these tokens take ``CHUNK_BYTES``."""
    return CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * chunk_words(vocabulary, device))
