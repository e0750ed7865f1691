"""Which weight plane a run uses, and how an engine reads what one offers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import RunConfig
from tunesmith.distributed.machines import own_address as own_address_in_launch
from tunesmith.distributed.torchrun import Launch
from tunesmith.openmp import to_thread
from tunesmith.plan.gpus import ranks_per_engine
from tunesmith.plan.publishing import BUCKET, publishing_ranks
from tunesmith.weights.base import NamedTensors, Offer, Plane

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.models.decoder import Decoder
    from tunesmith.weights.device import DevicePlane


class NoPlane:
    """Of engines that keep the weights they were started with."""

    async def publish(self, version: int) -> None: ...

    async def offer(self, takers: int) -> list[Offer]:
        return [{}] * takers

    async def withdraw(self, offers: Sequence[Offer]) -> None: ...

    async def close(self) -> None: ...


class PublishingRank(NoPlane):
    """Of a rank of a sharded model but the first: it takes part when the first one gathers the weights."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors

    async def publish(self, version: int) -> None:
        del version
        await to_thread(lambda: deque(self._tensors(), maxlen=0))

    async def offer(self, takers: int) -> list[Offer]:
        raise AssertionError(f"the first rank makes the offers, not this one to {takers}")


def make_publishing(config: RunConfig, model: Decoder, rank: int) -> Plane:
    """What a rank of a sharded model but the first has in the plane's place, or its part of the plane."""
    if config.system.weight_copy == "gpu":
        return device_plane(config, model, rank)
    return PublishingRank(published(model, merged=config.system.adapter_sync != "adapter", in_host_memory=False))


def make_plane(config: RunConfig, model: Decoder) -> Plane:
    """The trainer's side, for engines with weights of their own."""
    system = config.system
    merged, own, here = system.adapter_sync != "adapter", system.engine == "local", stays_on_gpu(config)
    tensors = published(model, merged=merged, as_stored=not own, in_host_memory=not here)
    size = published_bytes(model, merged=merged)
    if system.weight_plane == "ipc":
        from tunesmith.weights.ipc import IpcPlane

        return IpcPlane(tensors, str(model.device), size)
    if system.weight_plane == "gloo":
        from tunesmith.weights.broadcast import BroadcastPlane

        return BroadcastPlane(tensors, own_address(config), size, ranks_per_engine(config))
    if system.weight_plane == "nccl":
        return device_plane(config, model)
    directory = system.engine_directory if system.weight_plane == "disk" else None
    return file_plane(tensors, directory, size)


def device_plane(config: RunConfig, model: Decoder, rank: int = 0) -> DevicePlane:
    """The part of a rank of the trainer; where the copy is in host memory the first rank sends all."""
    from tunesmith.weights.device import DevicePlane

    system, host, ranks = config.system, own_address(config), ranks_per_engine(config)
    here, merged = stays_on_gpu(config), system.adapter_sync != "adapter"
    tensors = published(model, merged=merged, as_stored=system.engine != "local", in_host_memory=not here)
    senders = publishing_ranks(config) if here else 1
    room = published_bytes(model, merged=merged)
    room = room if senders == 1 else room // senders + largest_bytes(model)
    return DevicePlane(tensors, str(model.device), here, host, room, ranks, rank, senders)


def stays_on_gpu(config: RunConfig) -> bool:
    """Whether what is published never leaves the trainer's GPU but for an engine's."""
    return config.system.weight_plane == "ipc" or config.system.weight_copy == "gpu"


def own_address(config: RunConfig) -> str:
    """This machine's address, as the run's other processes reach it."""
    if config.system.cluster == "none":
        return launched_address()
    from tunesmith.distributed.ray_actor import node_address

    return node_address()


def launched_address() -> str:
    """As ``own_address``, without Ray."""
    launch = Launch.of()
    return own_address_in_launch() if launch and launch.several_machines else "127.0.0.1"


def file_plane(tensors: NamedTensors, directory: Path | None = None, num_bytes: int | None = None) -> Plane:
    """Files in a directory; None: in this machine's memory, or on its disk where there is no room.

    Args:
        num_bytes: of all tensors; None: they are counted.
    """
    from tunesmith.weights.files import FilePlane, shared_directory

    size = sum(t.nbytes for _, t in tensors()) if num_bytes is None else num_bytes
    return FilePlane(tensors, shared_directory(size, directory))


def published_bytes(model: Decoder, *, merged: bool = True) -> int:
    """Of what ``published`` gives, tied weights counted once, and some room to align them."""
    if model.adapter is not None and not merged:
        sizes = [tensor.nbytes for _, tensor in model.adapter.own_weights()]
    else:
        parameters = {id(p): p.numel() * model.dtype.itemsize for p in model.module.parameters()}
        state = model.module.state_dict()
        sizes = [*parameters.values(), *(b.nbytes for name, b in model.module.named_buffers() if name in state)]
    return sum(sizes) + 2048 * len(sizes)


def largest_bytes(model: Decoder) -> int:
    """Of the largest bucket of what is published."""
    largest = max((p.numel() for p in model.module.parameters()), default=0)
    return max(BUCKET, largest * model.dtype.itemsize)


def published(
    model: Decoder, *, merged: bool = True, as_stored: bool = False, in_host_memory: bool = True
) -> NamedTensors:
    """What engines elsewhere need of a model: its weights, those with the adapter in them, or the adapter's alone.

    Quantised weights are never sent: no one trains them, and an engine quantises the same ones.

    Args:
        as_stored: under the names and in the shapes of the model's files, which engines of others read; transformers
            fuses some, such as the experts of a mixture.
        in_host_memory: where weights go that have to be made: those gathered from ranks, or summed with an adapter;
            else they are on the model's device, and one of them at a time has room there.
    """
    from tunesmith.models.host_memory import stored_state
    from tunesmith.models.loading import stored_weights
    from tunesmith.models.quantised import is_quantised
    from tunesmith.models.sharding import whole_weights

    if model.adapter is not None:
        own = model.adapter.own_weights
        named: NamedTensors = partial(model.adapter.merged_weights, in_host_memory=in_host_memory) if merged else own
    elif model.sharding is not None:
        named = partial(whole_weights, model.module, model.dtype, in_host_memory=in_host_memory)
    else:
        named = dict[str, Any]().items if is_quantised(model.module) else stored_state(model.module).items
    return (lambda: stored_weights(model.module, named())) if as_stored else named


def read_offer(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The engine's side: the weights of an offer, a few at a time."""
    match offer["plane"]:
        case "gloo":
            from tunesmith.weights.broadcast import take_broadcast as take
        case "nccl":
            from tunesmith.weights.device import take_on_device as take
        case "ipc":
            from tunesmith.weights.ipc import take_ipc as take
        case _:
            from tunesmith.weights.files import take_files as take
    return take(offer)


def streams(offer: Offer) -> bool:
    """Whether the weights of an offer come bucket by bucket and are to be written at once: there is no room for all."""
    return offer["plane"] == "nccl"
