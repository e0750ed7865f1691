"""One model's keys and values: a tensor with two rectangular banks, whose rows can move.

Shape legend: ``P`` planes (the keys and the values of each layer), ``R`` rows, ``K`` key/value
heads, ``C`` slots of a row, ``D`` head size.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, int]
"""Rows, and slots per row."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The keys and values of one token of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def planes(self) -> int:
        """The keys and the values of each layer."""
        return 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.planes * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """``token_bytes`` plus the staging plane for moving rows."""
        return self.token_bytes // self.planes * (self.planes + 1)


@dataclass(slots=True)
class Bank:
    """A rectangle of slots, seen as tensors."""

    shape: Shape
    memory: Tensor  # [P, R, K, C, D]
    slots: tuple[Tensor, ...]  # P x [R * K * C, D]


class KVMemory:
    """One model's keys and values: one tensor, with the prompt bank at its front and the other bank
    at its back.

    One extra plane is the staging area for rows that move, so that moving takes no other memory.
    """

    def __init__(self, layout: KVLayout, slots: int) -> None:
        self.layout = layout
        self._slots = slots
        self._width = layout.kv_heads * layout.head_dim
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, zeroed: a masked slot must be finite too, because 0 times NaN is
        NaN.

        On a CPU, pages are allocated on first write, so unused slots take no memory.
        """
        dtype = self.layout.dtype
        device = self.layout.device
        shape = self.layout.planes + 1, self._slots * self._width
        if device.type != "cpu" or sys.platform == "win32":
            self._use(torch.zeros(shape, dtype=dtype, device=device))
            return
        pages = mmap.mmap(
            -1, shape[0] * shape[1] * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._use(torch.frombuffer(pages, dtype=dtype).view(shape))

    def free(self) -> None:
        self._use(self._memory.new_zeros(self.layout.planes + 1, 0))

    @property
    def nbytes(self) -> int:
        return self._memory.untyped_storage().nbytes()

    def _use(self, memory: Tensor) -> None:
        self._memory = memory
        self.prompts, self.completions = (
            self._bank((0, 0), front=True),
            self._bank((0, 0), front=False),
        )

    def _bank(self, shape: Shape, *, front: bool) -> Bank:
        rows, capacity = shape
        size = rows * capacity * self._width
        start = 0 if front else self._memory.shape[1] - size
        heads = self.layout.kv_heads
        dim = self.layout.head_dim
        memory = self._memory[:-1, start : start + size].view(
            self.layout.planes, rows, heads, capacity, dim
        )
        return Bank(shape, memory, memory.flatten(1, 3).unbind(0))

    def arranged(self, old: Bank, order: Sequence[int], length: int, shape: Shape) -> Bank:
        """A bank whose row ``i`` has the first ``length`` slots of row ``order[i]`` of ``old``,
        which it overwrites.

        Rows move through the staging plane; if the shape is unchanged, only rows whose place
        changes are moved.
        """
        same = shape == old.shape
        new = old if same else self._bank(shape, front=old is self.prompts)
        targets = [i for i, source in enumerate(order) if not same or i != source]
        if not targets or not length:
            return new
        device = self._memory.device
        source = torch.tensor([order[i] for i in targets], device=device)
        target = torch.tensor(targets, device=device)
        staged = self._memory[-1, : len(targets) * length * self._width]
        staged = staged.view(len(targets), self.layout.kv_heads, length, self.layout.head_dim)
        for before, after in zip(old.memory, new.memory, strict=True):
            torch.index_select(before[:, :, :length], 0, source, out=staged)
            after[:, :, :length].index_copy_(0, target, staged)
        return new
