"""Activations that are not on the device between the forward and the backward pass: recomputed, or
in host memory.

The tensors that autograd saves while a layer runs are the layer's group. The group is copied to the
host while the device computes the next layer, and back while it computes the backward pass of the
layer above. So the device holds two groups at a time; those of the last two layers, which are
needed first, never leave it. The host never synchronizes; the CUDA streams wait for each other. The
group of a recomputed layer is its input.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.errors import ModelError
from tunesmith.models.kernels.layers import LayerRunner, decoder_layers
from tunesmith.models.parallel.host_memory import CopyStream
from tunesmith.plan.cost.activations import recomputed

CHUNK = 64 << 20
"""Bytes per chunk of host memory; a power of two, to which pinned memory is rounded up."""
LEAST = 1 << 20
"""Minimum bytes for which a copy is worthwhile."""


def compute_again(module: PreTrainedModel, share: float) -> None:
    """Keep only the input of a share of the decoder's layers, and recompute their activations in
    the backward pass.

    Raises:
        ModelError: the layers cannot be checkpointed individually.
    """
    module.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(module)
    if share < 1 and not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise ModelError(
            f"system.gradient_checkpointing = {share:g}: the layers of '{module.name_or_path}' "
            "cannot be computed again one by one; set it to true or false",
            keys=("system.gradient_checkpointing",),
        )
    for layer, again in zip(layers, recomputed(len(layers), share), strict=True):
        vars(layer)["gradient_checkpointing"] = again  # as transformers sets it for all


@dataclass(slots=True)
class Storage:
    """A storage that autograd saves, perhaps through several views."""

    group: int
    here: Tensor | None
    """The chunk's bytes on the device; None: they are only in host memory."""
    there: list[Tensor] = field(default_factory=list[Tensor])
    """The chunk's bytes in host memory, once they have been sent there."""
    uses: int = 0
    """The number of its saved tensors that the backward pass has not read yet."""
    shared: bool = False
    """Whether several layers save it, such as position tables; it then stays on the device."""


@dataclass(frozen=True, slots=True)
class View:
    """A saved tensor."""

    storage: Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostActivations:
    """Offloads the tensors that a decoder's layers save to host memory."""

    def __init__(self, module: PreTrainedModel, runner: LayerRunner) -> None:
        self.device = module.device
        self.least = LEAST
        self.chunk = CHUNK
        self.copies = CopyStream(self.device)
        self.free: list[Tensor] = []
        """Unused chunks of host memory."""
        self.layers = len(decoder_layers(module))
        self._module = module
        self._pass: _Pass | None = None
        runner.before_layers(self.next_layer)

    @contextmanager
    def saving(self) -> Generator[None]:
        """A context for a forward pass of the decoder's layers, whose activations go to host
        memory."""
        weights = {p.untyped_storage()._cdata for p in self._module.parameters()}  # pyright: ignore
        self._pass = current = _Pass(self, weights)
        weakref.finalize(current, self._end, current.chunks).atexit = False
        try:
            with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
                yield
        finally:
            self._pass = None

    def next_layer(self) -> None:
        """Begin a layer, which may also be one recomputed in the backward pass."""
        if self._pass is not None:
            self._pass.next_layer()

    def take(self) -> Tensor:
        """A chunk of host memory, pinned for a GPU."""
        if self.free:
            return self.free.pop()
        return torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _end(self, chunks: list[Tensor]) -> None:
        """Reclaim a pass's chunks once its graph is gone, even if the pass failed during copies."""
        self.copies.settle()
        self.free += chunks


class _Pass:
    """The groups of one forward pass: tensors saved before the first layer, and by each layer."""

    def __init__(self, home: HostActivations, weights: set[int]) -> None:
        self._home = home
        self._weights = weights
        self.chunks: list[Tensor] = []
        self._used = home.chunk
        """Used bytes of the last chunk."""
        self._groups: list[list[Storage]] = [[]]
        self._known: dict[int, Storage] = {}
        """Storages on the device, by address."""
        self._at = -1
        """The group that the backward pass has reached."""

    def next_layer(self) -> None:
        """Send the group that is now complete; the one before it has arrived."""
        last = len(self._groups) - 1
        self._home.copies.settle()
        if last > 0:
            self._leave(last - 1)
        if last < self._home.layers - 1:
            with self._home.copies.copying():
                for storage in self._groups[last]:
                    self._send(storage)
        self._groups.append([])

    def pack(self, tensor: Tensor) -> Tensor | View:
        whole = tensor.untyped_storage()
        owner = tensor if tensor._base is None else tensor._base
        key: int = whole._cdata  # pyright: ignore[reportPrivateUsage]
        weight = isinstance(owner, nn.Parameter) or key in self._weights
        stays = weight or whole.nbytes() < self._home.least
        if stays or tensor.device.type != self._home.device.type:
            return tensor
        group = len(self._groups) - 1
        storage = self._known.get(key)
        if storage is None:
            flat = tensor.detach().as_strided((whole.nbytes() // tensor.element_size(),), (1,), 0)
            storage = self._known[key] = Storage(group, flat.view(torch.uint8))
            self._groups[group].append(storage)
        storage.shared = storage.shared or storage.group != group
        storage.uses += 1
        return View(
            storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, saved: Tensor | View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = saved.storage
        if storage.group != self._at and not storage.shared:
            self._come_to(storage.group)
        if storage.here is None:  # it is being read again
            self._fetch([storage])
            self._home.copies.settle()
        assert storage.here is not None
        tensor = storage.here.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)
        storage.uses -= 1
        if storage.uses < 1 and not storage.shared:
            storage.here = None
        return tensor

    def _come_to(self, group: int) -> None:
        """Fetch the group that the backward pass needs now, then the one below, which it needs
        next."""
        self._at = group
        for above in range(group + 1, len(self._groups)):
            self._leave(above)
        self._fetch(self._groups[group])  # already being copied, unless the group above is empty
        self._home.copies.settle()
        self._fetch(self._groups[max(0, group - 1)])

    def _send(self, storage: Storage) -> None:
        assert storage.here is not None
        rest = storage.here
        while len(rest):
            if self._used == self._home.chunk:
                self.chunks.append(self._home.take())
                self._used = 0
            size = min(len(rest), self._home.chunk - self._used)
            piece = self.chunks[-1][self._used : self._used + size]
            piece.copy_(rest[:size], non_blocking=True)
            storage.there.append(piece)
            rest = rest[size:]
            self._used = self._used + size

    def _leave(self, group: int) -> None:
        """Free a group's memory on the device."""
        for storage in self._groups[group]:
            if not storage.shared:
                storage.here = None
        self._known = {
            key: storage for key, storage in self._known.items() if storage.here is not None
        }

    def _fetch(self, storages: Iterable[Storage]) -> None:
        away = [storage for storage in storages if storage.here is None]
        for storage in away:
            assert storage.there, "the backward pass goes from the last layer to the first"
            size = sum(map(len, storage.there))
            storage.here = torch.empty(size, dtype=torch.uint8, device=self._home.device)
        with self._home.copies.copying():
            for storage in away:
                assert storage.here is not None
                for here, there in zip(
                    storage.here.split([*map(len, storage.there)]), storage.there, strict=True
                ):
                    here.copy_(there, non_blocking=True)
