"""Counts the bytes that tensors of a device hold, by purpose.

Every storage counts once, however many tensors view it, until the last of them is freed. Freed
memory stays with the process that allocated it, as with PyTorch's caching allocator: that process
uses it again, and the others of the device do without until it empties its cache.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tunesmith.guide.simulate.threads import occupant_of_thread

BLOCK = 512
"""CUDA's allocator rounds sizes up to multiples of this."""
CACHED = "cached by other processes"
"""The purpose under which a peak counts what other processes have freed and keep."""


@dataclass(slots=True)
class _Storage:
    size: int
    purpose: str
    process: str


@dataclass(slots=True)
class _Process:
    """Bytes of a process on the device."""

    used: int = 0
    reserved: int = 0


@dataclass(slots=True)
class MemoryUse:
    """Bytes in use by purpose, now and at the peak."""

    now: dict[str, int] = field(default_factory=dict[str, int])
    peak: dict[str, int] = field(default_factory=dict[str, int])
    _storages: dict[int, _Storage] = field(default_factory=dict[int, _Storage])
    _processes: dict[str, _Process] = field(default_factory=dict[str, _Process])

    @property
    def total(self) -> int:
        return sum(self.now.values())

    def begin(self) -> None:
        """Reset the peak."""
        self.peak = dict(self.now)

    def empty_cache(self) -> None:
        """Give the freed memory of this thread's process back to the device."""
        own = self._process(occupant_of_thread().process)
        own.reserved = own.used

    def add(self, tensor: Tensor, purpose: str) -> None:
        """Count a tensor's storage until it is freed; one that is counted already keeps its
        purpose."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = _Storage(0, purpose, occupant_of_thread().process)
            weakref.finalize(storage, self._remove, storage._cdata)
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        held = self._storages.get(storage._cdata)
        if held:
            before = held.size
            held.size = -(-storage.nbytes() // BLOCK) * BLOCK
            self._change(held, held.size - before)

    def assign(self, purpose: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the purpose of these tensors."""
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            held = None if own is None else self._storages.get(own.untyped_storage()._cdata)
            if held:
                self.now[held.purpose] -= held.size
                held.purpose = purpose
                self.now[purpose] = self.now.get(purpose, 0) + held.size

    def purpose(self, tensor: Tensor) -> str | None:
        held = self._storages.get(tensor.untyped_storage()._cdata)
        return held and held.purpose

    def _process(self, name: str) -> _Process:
        return self._processes.setdefault(name, _Process())

    def _remove(self, key: int) -> None:
        held = self._storages.pop(key)
        self._change(held, -held.size)

    def _change(self, held: _Storage, size: int) -> None:
        self.now[held.purpose] = self.now.get(held.purpose, 0) + size
        own = self._process(held.process)
        own.used += size
        own.reserved = max(own.reserved, own.used)
        others = [each for each in self._processes.values() if each is not own]
        cached = sum(each.reserved - each.used for each in others)
        if size > 0 and self.total + cached > sum(self.peak.values()):
            self.peak = {**self.now, CACHED: cached}
