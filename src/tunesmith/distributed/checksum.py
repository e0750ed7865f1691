"""A number that tells whether two tensors hold the same bytes."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

SLAB = 1 << 19
"""8-byte words that are summed at a time, so that their products take little memory."""


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes. On a GPU their ``word_sum``, for which the host waits."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.device.type == "cpu":
        plain: Any = raw.numpy()
        return zlib.crc32(plain)
    return int(word_sum(raw))


def word_sum(raw: Tensor) -> Tensor:
    """The sum of a uint8 tensor's 8-byte words, each multiplied by an odd number that counts its position.

    As the factors are odd, no change of a single word is lost, and words that change places are noticed. It is computed
    where the tensor is, modulo 2^64, and the host does not wait for it. A part of a word at the end is filled up with
    zeros.

    Returns:
        int64 ``[]`` on the tensor's device.
    """
    if len(raw) % 8 or raw.storage_offset() % 8:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8))
    words = raw.view(torch.int64)
    factors = torch.arange(1, 2 * min(SLAB, len(words)) + 1, 2, device=raw.device)
    total = words.new_zeros(())
    for number, slab in enumerate(words.split(SLAB)):
        total += (slab * factors[: len(slab)]).sum() + 2 * number * SLAB * slab.sum()
    return total
