"""Weights as one run of bytes with a table, the form in which they are sent."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tunesmith.plan.processes.weights import BUCKET as BUCKET

ALIGNMENT = 16
"""Bytes; every tensor begins at a multiple of it, so that it can be viewed in place."""

Row = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, and offset in bytes."""


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """``buffer`` is uint8 ``[bytes]``. Tied tensors are in it once, and in ``table`` under each of their names."""

    buffer: Tensor
    table: Sequence[Row]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, as views of the buffer."""
        for name, dtype, shape, start in self.table:
            kind: torch.dtype = getattr(torch, dtype)
            piece = self.buffer[start : start + prod(shape) * kind.itemsize]
            yield name, piece.view(kind).view(tuple(shape))


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Consecutive whole tensors, from byte ``start`` to ``stop`` of all; offsets in ``table`` count from ``start``."""

    start: int
    stop: int
    table: Sequence[Row]


def runs(table: Iterable[Row], size: int) -> Iterator[TensorRun]:
    """Split a table's tensors into runs of at most ``size`` bytes; a larger tensor is by itself.

    All names of a tensor are in one run, so rows are in the order of the bytes.
    """
    start, stop = 0, 0
    rows: list[Row] = []
    for name, dtype, shape, begin in sorted(table, key=lambda row: row[3]):
        end = begin + prod(shape) * getattr(torch, dtype).itemsize
        if rows and begin >= stop and end - start > size:
            yield TensorRun(start, stop, rows)
            start, rows = begin, []
        rows.append((name, dtype, shape, begin - start))
        stop = max(stop, end)
    if rows:
        yield TensorRun(start, stop, rows)


def laid_out(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Row, Tensor | None]]:
    """Lay tensors out one after the other; yields each with its row, or None if it is there under another name already.

    Each is dropped before the next one is requested.
    """
    starts: dict[Any, tuple[int, weakref.ref[Tensor]]] = {}
    end = 0
    for name, tensor in named:
        place = _place(tensor)
        start, first = starts.get(place, (end, lambda: None))
        new = tensor.numel() == 0 or first() is None  # no other live tensor has this memory
        if new:
            start, starts[place] = end, (end, weakref.ref(tensor))
            end += aligned(tensor.nbytes)
        yield (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start), tensor if new else None
        del tensor


def put(tensor: Tensor, buffer: Tensor, start: int) -> Tensor:
    """Copy a tensor's bytes into a buffer; returns the buffer, or a larger one if it was too small."""
    stop = start + tensor.nbytes
    if stop > buffer.numel():
        buffer = torch.nn.functional.pad(buffer, (0, max(stop - buffer.numel(), buffer.numel())))
    buffer[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return buffer


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's storage and its layout there; tensors without data have no address, but a storage."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def in_buckets(named: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most ``size`` bytes; a larger one is by itself.

    A group is emptied when the next one is requested: only one more tensor is held besides it.
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
