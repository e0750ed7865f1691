"""Copies of tensors in pinned host memory, which a GPU accesses directly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

ALIGNED = 64
"""Alignment of each tensor in bytes."""
PIECES = 8
"""Approximate number of pieces of memory to allocate, each at least as large as the largest
tensor."""


def host_copies(tensors: Sequence[Tensor], *, wide: bool = False) -> list[Tensor]:
    """Copies of tensors in host memory; with ``wide`` they are float32 or wider."""
    dtypes = [torch.promote_types(t.dtype, torch.float32) if wide else t.dtype for t in tensors]
    memory = host_memory(tensors, dtypes, pinned=any(t.is_cuda for t in tensors))
    return [copy.copy_(tensor) for copy, tensor in zip(memory, tensors, strict=True)]


def host_memory(
    like: Sequence[Tensor], dtypes: Sequence[torch.dtype] = (), *, pinned: bool
) -> list[Tensor]:
    """Uninitialised tensors of these shapes, in host memory.

    Args:
        dtypes: the dtype of each; empty: as in ``like``.
        pinned: use pinned memory, which a GPU accesses directly.
    """
    dtypes = dtypes or [t.dtype for t in like]
    sizes = [t.numel() * dtype.itemsize for t, dtype in zip(like, dtypes, strict=True)]
    places, pieces = packed(sizes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in pieces]
    found = [memory[piece][at : at + size] for (piece, at), size in zip(places, sizes, strict=True)]
    return [f.view(d).view(t.shape) for f, d, t in zip(found, dtypes, like, strict=True)]


class HostShelf:
    """Pinned host memory in which a device's tensors wait, kept for the next time: fresh memory is
    several times as slow."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in host memory of the tensors that are on a GPU, in place of these. They hold
        until the next call that finds tensors there."""
        here = [tensor for tensor in tensors if tensor.is_cuda]
        if not here:  # they wait already
            return list(tensors)
        if [(t.shape, t.dtype) for t in here] != [(t.shape, t.dtype) for t in self._memory]:
            self._memory = host_memory(here, pinned=True)
        for copy, tensor in zip(self._memory, here, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(here[0].device).synchronize()
        copies = iter(self._memory)
        return [next(copies) if tensor.is_cuda else tensor for tensor in tensors]


class CopyStream:
    """Copies between a device and host memory that overlap with computation; on a CPU they are
    immediate."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copying(self) -> AbstractContextManager[object]:
        """A context whose copies start once the device has finished its work so far, and overlap
        with later work."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def settle(self) -> None:
        """Make the device's later work wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def packed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Pack tensors of these sizes in bytes into a few pieces of memory.

    Returns each tensor's piece and offset, and the sizes of the pieces, which are powers of two:
    torch rounds every piece of pinned memory up to one, so a piece per tensor would take up to
    twice as much.
    """
    sizes = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    most = _power_of_two(max([*sizes, sum(sizes) // PIECES, 1]))
    places = [(0, 0)] * len(sizes)
    used = list[int]()
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[index]
        piece = next((number for number, end in enumerate(used) if end + size <= most), len(used))
        if piece == len(used):
            used.append(0)
        places[index] = (piece, used[piece])
        used[piece] += size
    return places, [_power_of_two(end) for end in used]


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
