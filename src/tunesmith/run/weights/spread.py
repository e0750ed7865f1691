"""A copy of weights as runs of bytes, the form in which they are sent; each run is kept by one of
several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; every tensor begins at a multiple of it, so that it can be viewed in place."""

Row = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, and first byte in the run."""


@dataclass(slots=True)
class Run:
    """Consecutive whole tensors. Tied ones are in it once, and in ``table`` under each of their
    names.

    Args:
        owner: the rank that keeps it.
        start: its first byte in the owner's memory.
        size: its bytes.
    """

    owner: int
    start: int
    size: int = 0
    table: list[Row] = field(default_factory=list[Row])

    def add(self, name: str, tensor: Tensor, start: int) -> None:
        """Note a tensor that begins at byte ``start``."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.table.append((name, dtype, tuple(tensor.shape), start))

    def named(self, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors, as views of the run's bytes, uint8 ``[size]``."""
        for name, dtype, shape, start in self.table:
            kind: torch.dtype = getattr(torch, dtype)
            piece = data[start : start + prod(shape) * kind.itemsize]
            yield name, piece.view(kind).view(tuple(shape))


@dataclass(frozen=True, slots=True)
class Spread:
    """The runs of all ranks, in the order in which the tensors came, and this rank's memory.

    Args:
        own: the bytes of each run that this rank keeps, uint8, by the run's number.
    """

    runs: Sequence[Run]
    buffer: Tensor
    own: Mapping[int, Tensor]


def spread(
    named: Iterable[tuple[str, Tensor]],
    size: int,
    device: str = "cpu",
    *,
    rank: int = 0,
    ranks: int = 1,
    into: Tensor | None = None,
    room: int = 0,
) -> Spread:
    """Copy tensors in runs of at most ``size`` bytes; a larger tensor is by itself.

    Each run goes to the rank with the fewest bytes. All ranks iterate over the same tensors,
    dropping each before the next.

    Args:
        into: the buffer of an earlier copy, which is reused.
        room: bytes of a new buffer, which grows if needed.
    """
    buffer = torch.zeros(room, dtype=torch.uint8, device=device) if into is None else into
    runs = list[Run]()
    filled = [0] * ranks
    places: dict[Any, tuple[weakref.ref[Tensor], Run, int]] = {}
    for name, tensor in named:
        place = _place(tensor)
        there = places.get(place)
        is_new = there is None or there[0]() is None or not tensor.numel()
        if there is None or is_new:  # no other live tensor has this memory
            if not runs or align(runs[-1].size) + tensor.nbytes > size:
                owner = filled.index(min(filled))
                runs.append(Run(owner, filled[owner]))
            run = runs[-1]
            there = places[place] = weakref.ref(tensor), run, align(run.size)
            if run.owner == rank:
                start = run.start + there[2]
                if start + tensor.nbytes > buffer.numel():
                    more = max(start + tensor.nbytes - buffer.numel(), buffer.numel())
                    buffer = torch.nn.functional.pad(buffer, (0, more))
                put(tensor, buffer, start)
            run.size = there[2] + tensor.nbytes
            filled[run.owner] = align(run.start + run.size)
        _, run, start = there
        run.add(name, tensor, start)
        del tensor
    kept = [(number, run) for number, run in enumerate(runs) if run.owner == rank]
    own = {number: buffer[run.start : run.start + run.size] for number, run in kept}
    return Spread(runs, buffer, own)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's storage and its layout there; tensors without data have no address, but a
    storage."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def put(tensor: Tensor, buffer: Tensor, start: int) -> None:
    """Copy a tensor's bytes into a buffer."""
    place = buffer[start : start + tensor.nbytes]
    place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
