"""Model weights that are on the device only while the model is in use."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Self

from torch import Tensor, nn

from tunesmith.models.parallel.host_memory import host_copies


class HostWeights:
    """Moves a model's weights off its device and back.

    Offloaded weights keep empty storages, so that views of them, such as the joint weights of
    ``lean``, become valid again once they return. The host waits for no copy: work on the device is
    ordered after it.

    FSDP2's offloading is for models that are sharded: it brings a layer at a time, in every pass,
    through a process group. An engine that sleeps gives away everything at once and for long, and a
    frozen model scores many micro-batches between coming and leaving.

    Args:
        tensors: the weights.
        kept: keep them in host memory meanwhile; if False, they return uninitialized and have to be
            rewritten.
    """

    def __init__(self, tensors: Iterable[Tensor], *, kept: bool = True) -> None:
        self._away = False
        # Tied weights share a storage, as do those of a joint product.
        storages = {
            tensor.untyped_storage()._cdata: tensor.detach()  # pyright: ignore
            for tensor in tensors
            if tensor.numel()
        }
        self._here = [_flat(tensor) for tensor in storages.values()]
        self._sizes = [flat.untyped_storage().nbytes() for flat in self._here]
        self._there = host_copies(self._here) if kept else []

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """The weights of a frozen model, offloaded immediately."""
        made = cls((*module.parameters(), *module.buffers()))
        made.leave()
        return made

    @contextmanager
    def here(self, *, changes: bool = False) -> Generator[None]:
        """A context in which the weights are on the device.

        Args:
            changes: the weights change inside; copy them back to host memory at the end.
        """
        try:
            self.come()
            yield
            for here, there in zip(self._here, self._there, strict=False) if changes else ():
                there.copy_(here)
        finally:
            self.leave()

    def come(self) -> None:
        if not self._away:
            return
        for here, size in zip(self._here, self._sizes, strict=True):
            here.untyped_storage().resize_(size)
        for here, there in zip(self._here, self._there, strict=False):
            here.copy_(there, non_blocking=True)
        self._away = False

    def leave(self) -> None:
        self._away = True
        for here in self._here:
            here.untyped_storage().resize_(0)


def _flat(tensor: Tensor) -> Tensor:
    """A flat view of a tensor's whole storage."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
