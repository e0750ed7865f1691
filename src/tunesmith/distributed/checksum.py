"""A number that tells whether two tensors hold the same bytes."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes. On a GPU, a sum of its 8-byte words, each multiplied by its position."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.device.type == "cpu":
        plain: Any = raw.numpy()
        return zlib.crc32(plain)
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    places = torch.arange(1, 2 * len(words), 2, device=raw.device)  # odd: no change of a single word is lost
    return int((words * places).sum())
