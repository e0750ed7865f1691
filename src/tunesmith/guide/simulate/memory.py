"""Counts the bytes that tensors of a device hold, by purpose.

Every storage counts once, however many tensors view it, until the last of them is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK = 512
"""CUDA's allocator rounds sizes up to multiples of this."""


@dataclass(slots=True)
class _Storage:
    size: int
    purpose: str


@dataclass(slots=True)
class MemoryUse:
    """Bytes in use by purpose, now and at the peak."""

    now: dict[str, int] = field(default_factory=dict[str, int])
    peak: dict[str, int] = field(default_factory=dict[str, int])
    _storages: dict[int, _Storage] = field(default_factory=dict[int, _Storage])

    @property
    def total(self) -> int:
        return sum(self.now.values())

    def begin(self) -> None:
        """Reset the peak."""
        self.peak = dict(self.now)

    def add(self, tensor: Tensor, purpose: str) -> None:
        """Count a tensor's storage until it is freed; one that is counted already keeps its
        purpose."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:  # pyright: ignore[reportPrivateUsage]
            self._storages[storage._cdata] = _Storage(0, purpose)  # pyright: ignore[reportPrivateUsage]
            weakref.finalize(storage, self._remove, storage._cdata)  # pyright: ignore[reportPrivateUsage]
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        held = self._storages.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        if held:
            before = held.size
            held.size = -(-storage.nbytes() // BLOCK) * BLOCK
            self._change(held.purpose, held.size - before)

    def assign(self, purpose: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the purpose of these tensors."""
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if own is not None and (held := self._storages.get(own.untyped_storage()._cdata)):  # pyright: ignore[reportPrivateUsage]
                self.now[held.purpose] -= held.size
                held.purpose = purpose
                self._change(purpose, held.size)

    def purpose(self, tensor: Tensor) -> str | None:
        held = self._storages.get(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]
        return held and held.purpose

    def _remove(self, key: int) -> None:
        held = self._storages.pop(key)
        self.now[held.purpose] -= held.size

    def _change(self, purpose: str, size: int) -> None:
        self.now[purpose] = self.now.get(purpose, 0) + size
        if self.total > sum(self.peak.values()):
            self.peak = dict(self.now)
