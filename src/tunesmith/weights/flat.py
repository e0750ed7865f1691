"""Weights as one run of bytes with a table, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; every tensor begins at a multiple of it, so that it can be viewed in place."""
BUCKET = 64 << 20
"""Bytes that are sent, or checked, at a time."""

Row = tuple[str, str, tuple[int, ...], int]
"""Name, number format, shape, and where it begins, in bytes."""


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """``buffer`` is uint8 ``[bytes]``. Tied tensors stand in it once, and in ``table`` under each of their names."""

    buffer: Tensor
    table: list[Row]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, as views of the buffer."""
        for name, dtype, shape, start in self.table:
            kind: torch.dtype = getattr(torch, dtype)
            piece = self.buffer[start : start + prod(shape) * kind.itemsize]
            yield name, piece.view(kind).view(tuple(shape))


def flatten(named: Iterable[tuple[str, Tensor]], device: str = "cpu", into: Tensor | None = None) -> FlatWeights:
    """A copy of tensors, one after the other.

    Args:
        into: a buffer that is used again where it has the right size and place: fresh memory is slow at first.
    """
    tensors: list[tuple[Tensor, int]] = []
    table: list[Row] = []
    starts: dict[Any, int] = {}
    end = 0
    for name, tensor in named:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() == 0 or place not in starts:
            starts[place] = end
            tensors.append((tensor.detach(), end))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        table.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), starts[place]))
    if into is None or into.numel() != end or into.device != torch.device(device):
        into = torch.zeros(end, dtype=torch.uint8, device=device)
    for tensor, start in tensors:
        piece = into[start : start + tensor.nbytes]
        piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return FlatWeights(into, table)
