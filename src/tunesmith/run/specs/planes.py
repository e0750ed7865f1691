"""The weight plane of a run, and how an engine reads its offers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tunesmith.models.openmp import to_thread
from tunesmith.plan.devices import BUCKET
from tunesmith.run.specs.base import ALONE, Seat
from tunesmith.run.weights.base import NamedTensors, Offer, Plane

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.models.decoder import Decoder
    from tunesmith.run.weights.broadcast import BroadcastPlane
    from tunesmith.run.weights.ipc import IpcPlane


class NoPlane(Plane):
    """The plane for engines that keep the weights with which they were started."""

    async def publish(self, version: int) -> None: ...

    async def offer(self, takers: int) -> list[Offer]:
        return [{}] * takers


class PublishingRank(NoPlane):
    """The plane of a sharded model's ranks other than the first, which only take part in gathering
    the weights."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors

    async def publish(self, version: int) -> None:
        del version
        await to_thread(lambda: deque(self._tensors(), maxlen=0))

    async def offer(self, takers: int) -> list[Offer]:
        raise AssertionError(f"the first rank makes the offers, not this one to {takers}")


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """The trainer's side of the weight plane, for engines with their own weights."""

    kind: Literal["memory", "disk", "gloo", "nccl", "ipc"]
    publishers: int = 1
    """Trainer ranks that publish: the first ones, which together have the whole model; with ``ipc``
    all, each for the engines on its device."""
    merged: bool = True
    """Whether an adapter is merged into the weights; if not, it is all that is sent."""
    as_stored: bool = False
    """See ``published``."""
    copy_on_gpu: bool = False
    """Whether ``nccl`` sends from a copy on the trainer's GPUs, a part of it on each."""
    directory: Path | None = None
    """For ``disk``: the directory that trainer and engines see."""
    ranks_per_engine: int = 1

    @property
    def stays_on_gpu(self) -> bool:
        """Whether published weights go only from the trainer's GPU to an engine's, never to the
        host."""
        return self.kind == "ipc" or self.copy_on_gpu

    def tensors(self, model: Decoder) -> NamedTensors:
        """The weights that engines get."""
        here = not self.stays_on_gpu
        return published(model, merged=self.merged, as_stored=self.as_stored, in_host_memory=here)

    def build(self, model: Decoder, seat: Seat = ALONE) -> Plane | None:
        """A rank's part of the plane; None if it has none."""
        if seat.rank >= self.publishers:
            return None
        if self.kind == "ipc":
            return self.buckets(model, seat)
        if self.copy_on_gpu or (self.kind in ("gloo", "nccl") and not seat.rank):
            return self.broadcast(model, seat)
        if seat.rank:
            return PublishingRank(published(model, merged=self.merged, in_host_memory=False))
        size = published_bytes(model, merged=self.merged)
        return file_plane(self.tensors(model), self.directory, size)

    def buckets(self, model: Decoder, seat: Seat) -> IpcPlane:
        """A rank's part of the plane for engines on the ranks' devices."""
        from tunesmith.run.weights.ipc import IpcPlane

        sizes = _sizes(model, merged=self.merged)
        return IpcPlane(
            self.tensors(model),
            str(model.device),
            sum(sizes),
            max(BUCKET, *sizes),
            host=seat.address,
            ranks=self.ranks_per_engine,
            rank=seat.rank,
            senders=self.publishers,
        )

    def broadcast(self, model: Decoder, seat: Seat) -> BroadcastPlane:
        """A rank's part of a broadcast; if the copy is in host memory, the first rank sends
        everything."""
        from tunesmith.run.weights.broadcast import BroadcastPlane

        tensors = self.tensors(model)
        room = published_bytes(model, merged=self.merged)
        on_gpu = self.stays_on_gpu
        senders = self.publishers if on_gpu else 1
        if senders > 1:
            room = room // senders + largest_bytes(model)
        make = partial(
            BroadcastPlane, tensors, host=seat.address, room=room, ranks=self.ranks_per_engine
        )
        if self.kind == "gloo":
            return make("cpu", plane="gloo", group="gloo")
        return make(str(model.device), on_gpu, rank=seat.rank, senders=senders)


def file_plane(
    tensors: NamedTensors, directory: Path | None = None, num_bytes: int | None = None
) -> Plane:
    """A plane of files in a directory; None: in this machine's memory, or on its disk if there is
    no room.

    Args:
        num_bytes: size of all tensors; None: it is computed.
    """
    from tunesmith.run.weights.directories import shared_directory
    from tunesmith.run.weights.files import FilePlane

    size = sum(t.nbytes for _, t in tensors()) if num_bytes is None else num_bytes
    return FilePlane(tensors, shared_directory(size, directory))


def published_bytes(model: Decoder, *, merged: bool = True) -> int:
    """Bytes of ``published`` weights, with tied weights counted once and some room for
    alignment."""
    sizes = _sizes(model, merged=merged)
    return sum(sizes) + 2048 * len(sizes)


def _sizes(model: Decoder, *, merged: bool) -> list[int]:
    """Bytes of each published tensor, with tied weights counted once."""
    from tunesmith.models.kernels.quantised import weights_of
    from tunesmith.models.parallel.sharding import whole_dtype

    if model.adapter is not None and not merged:
        return [tensor.nbytes for _, tensor in model.adapter.own_weights()]
    counts = {id(parameter): count for parameter, count in weights_of(model.module)}
    parameters = {
        id(p): counts[id(p)] * whole_dtype(model.module, name, model.dtype).itemsize
        for name, p in model.module.named_parameters()
        if ".lora_" not in name
    }
    state = model.module.state_dict()
    buffers = [b.nbytes for name, b in model.module.named_buffers() if name in state]
    return [*parameters.values(), *buffers]


def largest_bytes(model: Decoder) -> int:
    """Bytes of the largest bucket of published weights."""
    from tunesmith.models.kernels.quantised import weights_of

    largest = max((count for _, count in weights_of(model.module)), default=0)
    return max(BUCKET, largest * model.dtype.itemsize)


def published(
    model: Decoder, *, merged: bool = True, as_stored: bool = False, in_host_memory: bool = True
) -> NamedTensors:
    """The weights that engines elsewhere need: the model's, with the adapter merged in, or only the
    adapter's.

    Quantised weights are sent only if an adapter is merged into them, which dequantises them: they
    are not trained, and an engine rounds the same weights itself.

    Args:
        as_stored: use the names and shapes of the model's and the adapter's files, which
            third-party engines read; transformers fuses some weights, such as the experts of a
            mixture.
        in_host_memory: put computed weights (gathered from ranks, or summed with an adapter) in
            host memory; if False, they are on the model's device, one at a time.
    """
    from tunesmith.models.kernels.quantised import is_quantised
    from tunesmith.models.parallel.shard_files import stored_weights
    from tunesmith.models.parallel.sharding import whole_weights

    adapter = model.adapter
    if adapter is not None and not merged:
        return adapter.saved_weights if as_stored else adapter.own_weights
    if adapter is not None:
        named: NamedTensors = partial(adapter.merged_weights, in_host_memory=in_host_memory)
    elif model.sharding is not None:
        named = partial(whole_weights, model.module, model.dtype, in_host_memory=in_host_memory)
    else:
        named = ({} if is_quantised(model.module) else model.module.state_dict()).items
    return (lambda: stored_weights(model.module, named())) if as_stored else named


def read_offer(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The engine's side of the plane: the weights of an offer, a few at a time."""
    match offer["plane"]:
        case "gloo" | "nccl":
            from tunesmith.run.weights.broadcast import take_broadcast as take
        case "ipc":
            from tunesmith.run.weights.ipc import take_ipc as take
        case _:
            from tunesmith.run.weights.files import take_files as take
    return take(offer)


def streams(offer: Offer) -> bool:
    """Whether an offer's weights arrive bucket by bucket and must be written immediately: there is
    no room for all."""
    return offer["plane"] in ("nccl", "ipc")
