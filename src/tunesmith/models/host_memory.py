"""Copies of tensors in host memory, in pages that a GPU reaches itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

ALIGNED = 64
"""Bytes; each tensor begins at a multiple of them."""
PIECES = 8
"""About so many pieces of memory are taken, each as large as the largest tensor at least."""
PLACE = "stored_in_host_memory"
"""The attribute of a parameter that has its numbers there: a tensor of them."""


def host_copies(tensors: Sequence[Tensor], *, wide: bool = False, device: torch.device | None = None) -> list[Tensor]:
    """Copies of tensors.

    Args:
        wide: in float32 or wider.
        device: reaches them itself; None: the one that the tensors are on.
    """
    dtypes = [torch.promote_types(t.dtype, torch.float32) if wide else t.dtype for t in tensors]
    pinned = any(t.is_cuda for t in tensors) if device is None else device.type == "cuda"
    memory = host_memory(tensors, dtypes, pinned=pinned)
    return [copy.copy_(tensor) for copy, tensor in zip(memory, tensors, strict=True)]


def host_memory(like: Sequence[Tensor], dtypes: Sequence[torch.dtype] = (), *, pinned: bool) -> list[Tensor]:
    """Uninitialised tensors of these shapes.

    Args:
        dtypes: of each; none: their own.
        pinned: a GPU reaches them itself.
    """
    dtypes = dtypes or [t.dtype for t in like]
    sizes = [t.numel() * dtype.itemsize for t, dtype in zip(like, dtypes, strict=True)]
    places, pieces = packed(sizes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in pieces]
    found = [memory[piece][at : at + size] for (piece, at), size in zip(places, sizes, strict=True)]
    return [f.view(d).view(t.shape) for f, d, t in zip(found, dtypes, like, strict=True)]


class CopyStream:
    """Copies between a device and host memory, beside what the device computes; a CPU makes them at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None

    def copying(self) -> AbstractContextManager[object]:
        """Copies inside begin when the device has done what it was given so far, and run beside what follows."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def settle(self) -> None:
        """What the device is given from now on begins when all copies are done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def stored_state(module: nn.Module) -> dict[str, Tensor]:
    """``module.state_dict()``, with the numbers in host memory where they are kept there (``models.streamed``)."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return {name: getattr(tensor, PLACE, tensor.detach()) for name, tensor in state.items()}


def packed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Few pieces of memory that hold tensors of these bytes: the piece of each and its place there, and the sizes of
    the pieces, which are powers of two. Torch rounds every piece of pinned memory up to one, so that a piece for each
    tensor takes up to twice as much."""
    sizes = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    most = _power_of_two(max([*sizes, sum(sizes) // PIECES, 1]))
    places, used = [(0, 0)] * len(sizes), list[int]()
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
