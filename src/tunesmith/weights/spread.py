"""A copy of weights that is spread over several ranks by whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.weights.flat import Row, TensorRun, aligned, laid_out, put, runs


@dataclass(frozen=True, slots=True)
class Spread:
    """Runs of whole tensors, in the order in which the tensors came.

    Args:
        table: rows of all tensors, as if they were stored one after the other.
        owners: the rank that keeps each run.
        buffer: this rank's memory.
        own: the bytes of each run that this rank keeps, uint8, by the run's number.
    """

    table: Sequence[Row]
    runs: Sequence[TensorRun]
    owners: Sequence[int]
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

    Each run goes to the rank with the fewest bytes. All ranks iterate over the same tensors, dropping each before the
    next.

    Args:
        into: the buffer of an earlier copy, which is reused.
        room: bytes of a new buffer, which grows if needed.
    """
    buffer = torch.zeros(room, dtype=torch.uint8, device=device) if into is None else into
    table, owners, loads = list[Row](), list[int](), [0] * ranks
    places: dict[int, int] = {}
    start = stop = kept = 0
    for row, tensor in laid_out(named):
        table.append(row)
        if tensor is None:
            continue
        begin, end = row[3], row[3] + tensor.nbytes
        if not owners or (begin >= stop and end - start > size):
            start, owner = begin, loads.index(min(loads))
            if owner == rank:
                places[len(owners)] = kept
            owners.append(owner)
        stop = max(stop, end)
        loads[owners[-1]] += tensor.nbytes
        if owners[-1] == rank:
            place = places[len(owners) - 1] + begin - start
            buffer, kept = put(tensor, buffer, place), place + aligned(tensor.nbytes)
        del tensor
    found = [*runs(table, size)]
    assert len(found) == len(owners), "runs are made by one rule"
    own = {number: buffer[place : place + found[number].stop - found[number].start] for number, place in places.items()}
    return Spread(table, found, owners, buffer, own)
