"""Weights of a decoder's layers in host memory; a layer's weights are on the device while the layer
runs.

While one layer computes, forward or backward, the next layer's weights are being copied, so the
device holds those of two layers. The host never synchronizes; the CUDA streams wait for each other.
Everything else, such as embeddings, heads and adapters, stays on the device. An offloaded weight
keeps an empty storage, so tensors that autograd saved become valid again once the weight returns.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.models.kernels.lean import LeanDecoder
from tunesmith.models.parallel.host_memory import PLACE, CopyStream, host_copies
from tunesmith.models.parallel.sharding import decoder_layers, local


class StreamedLayers:
    """Copies layers' weights to the device and drops them there, once ``take`` has run.

    Args:
        module: a module in host memory, with all its weights.
    """

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.device = device
        self._copies = CopyStream(device)
        self._layers = decoder_layers(module)
        copies = iter(
            host_copies(
                [p.data for layer in self._layers for p in layer.parameters()], device=device
            )
        )
        self._stored = [[*islice(copies, len([*layer.parameters()]))] for layer in self._layers]
        self._weights: list[list[tuple[Tensor, Tensor]]] = []
        """For each layer: pairs of a tensor on the device and the tensor in host memory with its
        values."""
        self._storages: list[list[tuple[torch.UntypedStorage, int]]] = []
        """For each layer: its storages on the device, with their sizes in bytes."""
        self._moved: Sequence[Callable[[], None]] = ()
        """Records that a layer's weights have new addresses, where there are views of them, such as
        joint products."""
        self._taken, self._here = set[int](), set[int]()
        """Layers with memory on the device, and those among them whose weights are there or being
        copied."""

    def arriving(self) -> Iterator[nn.Module]:
        """Yield the layers, each with its weights on the device until the next one is requested."""
        for index, layer in enumerate(self._layers):
            yield layer._apply(self._placed)  # pyright: ignore[reportUnknownMemberType]
            parameters = [*layer.parameters()]
            stored = self._stored[index]
            self._weights.append(
                [(p.data, kept) for p, kept in zip(parameters, stored, strict=True)]
            )
            found = {s._cdata: s for p in parameters if (s := p.untyped_storage()).nbytes()}
            self._storages.append([(storage, storage.nbytes()) for storage in found.values()])
            self._drop(index)
            layer.register_forward_pre_hook(partial(self._module_begins, index))
            layer.register_forward_hook(partial(self._module_ends, index))

    def _placed(self, tensor: Tensor) -> Tensor:
        """A copy in separate memory, even if already on the device: memory of a mapped file cannot
        be freed."""
        return torch.empty_like(tensor, device=self.device).copy_(tensor)

    def take(self, module: PreTrainedModel, lean: LeanDecoder | None) -> None:
        """Take all layers, and put the rest of the module on the device.

        Args:
            lean: the lean form that was made of ``arriving``; None: nothing iterated over it.
        """
        if lean is None:
            deque(self.arriving(), 0)
        else:
            self._moved = [layer.moved for layer in lean.layers]
            lean.before_layer.append(self.begin)
            lean.after_layer.append(self.end)
        module._apply(lambda t: t if t.device.type == self.device.type else self._placed(t))  # pyright: ignore
        for layer, stored in zip(self._layers, self._stored, strict=True):
            for parameter, kept in zip(layer.parameters(), stored, strict=True):
                setattr(parameter, PLACE, kept)  # now, because _apply may make new parameters
        module.tie_weights()

    def begin(self, index: int) -> None:
        """Prepare for computing a layer, and then the one above it; after the last layer, the
        backward pass begins."""
        self._show(index, index + 1 if index + 1 < len(self._layers) else index - 1)

    def end(self, index: int, states: Tensor) -> None:
        """Args: states: the layer's output; the layer is needed again when its gradient is
        complete."""
        if states.requires_grad:
            states.register_hook(partial(self._backward, index))  # pyright: ignore[reportUnknownMemberType]

    def leave(self) -> None:
        """Drop all layers' weights from the device."""
        self._copies.settle()
        for index in [*self._taken]:
            self._drop(index)

    def _backward(self, index: int, grad: Tensor) -> None:
        del grad
        self._show(index, index - 1 if index else 1)

    def _module_begins(self, index: int, module: nn.Module, given: tuple[Any, ...]) -> None:
        del module, given
        if not _in_backward():  # when a layer is recomputed, its weights are already there
            self.begin(index)

    def _module_ends(
        self, index: int, module: nn.Module, given: tuple[Any, ...], found: Any
    ) -> None:
        del module, given
        if not _in_backward():
            self.end(index, found if isinstance(found, Tensor) else found[0])

    def _show(self, now: int, then: int) -> None:
        self._copies.settle()
        for index in self._taken - {now, then}:
            self._drop(index)
        if now not in self._here:
            self._bring(now)
            self._copies.settle()
        if 0 <= then < len(self._layers) and then not in self._here:
            self._bring(then)

    def _bring(self, index: int) -> None:
        # Memory belongs to the computing stream: it is free once that stream is done with the layer
        # that had it.
        self._taken.add(index)
        for storage, size in self._storages[index]:
            storage.resize_(size)
        with self._copies.copying():
            for here, there in self._weights[index]:
                here.copy_(there, non_blocking=True)
        self._here.add(index)
        if self._moved:
            self._moved[index]()

    def _drop(self, index: int) -> None:
        for storage, _ in self._storages[index]:
            storage.resize_(0)
        self._taken.discard(index)
        self._here.discard(index)


def stored(parameter: Tensor) -> Tensor:
    """The tensor with this process's values of a parameter: in host memory, or else the parameter
    or its rows."""
    kept = getattr(parameter, PLACE, None)
    return local(parameter.detach()) if kept is None else kept


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
