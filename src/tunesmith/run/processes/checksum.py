"""Checksums that tell whether two tensors hold the same bytes."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

SLAB = 1 << 19
"""8-byte words summed at a time, so that their products take little memory."""


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes; on a GPU their ``word_sum``, for which the host synchronizes."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.device.type == "cpu":
        plain: Any = raw.numpy()
        return zlib.crc32(plain)
    return int(word_sum(raw))


def word_sum(raw: Tensor) -> Tensor:
    """The sum of a uint8 tensor's 8-byte words, each multiplied by an odd number that grows with
    its position.

    Because the factors are odd, a change of any single word is detected; words that change places
    are too. The sum is computed on the tensor's device, modulo 2^64, without synchronizing the
    host. A partial word at the end is padded with zeros.

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
