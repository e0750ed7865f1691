"""Weights as one run of bytes with a table, in the form in which they travel."""

from __future__ import annotations

import weakref
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


def flatten(
    named: Iterable[tuple[str, Tensor]], device: str = "cpu", into: Tensor | None = None, room: int = 0
) -> FlatWeights:
    """A copy of tensors, one after the other. Each is dropped before the next one is asked for.

    Args:
        into: the buffer of an earlier copy, which is used again: fresh memory is slow at first.
        room: bytes of a new buffer, which grows where they are too few.
    """
    buffer = torch.zeros(room, dtype=torch.uint8, device=device) if into is None else into
    table: list[Row] = []
    starts: dict[Any, tuple[int, weakref.ref[Tensor]]] = {}
    end = 0
    for name, tensor in named:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        start, first = starts.get(place, (end, lambda: None))
        if tensor.numel() == 0 or first() is None:  # no other tensor that is still there has this memory
            start, stop = end, end + tensor.nbytes
            if stop > buffer.numel():
                buffer = torch.nn.functional.pad(buffer, (0, max(stop - buffer.numel(), buffer.numel())))
            buffer[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            starts[place] = start, weakref.ref(tensor)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        table.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
        del tensor
    return FlatWeights(buffer[: min(end, buffer.numel())], table)


def in_buckets(named: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most ``size`` bytes; a larger one is by itself.

    A group is emptied when the next one is asked for: besides it only one tensor is held.
    """
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in named:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket.clear()
            filled = 0
        bucket[name] = tensor
        filled += tensor.nbytes
    if bucket:
        yield bucket
