"""The weight plane of a run, and how an engine reads its offers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import RunConfig
from tunesmith.models.openmp import to_thread
from tunesmith.plan.devices import BUCKET
from tunesmith.plan.plan import devices_of
from tunesmith.run.processes.machines import own_address as own_address_in_launch
from tunesmith.run.processes.torchrun import Launch
from tunesmith.run.weights.base import NamedTensors, Offer, Plane

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.models.decoder import Decoder
    from tunesmith.run.weights.broadcast import BroadcastPlane


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


def make_publishing(config: RunConfig, model: Decoder, rank: int) -> Plane:
    """The part of the plane, or its substitute, on a sharded model's ranks other than the first."""
    if config.system.weight_copy == "gpu":
        return broadcast_plane(config, model, rank)
    return PublishingRank(
        published(model, merged=config.system.adapter_sync != "adapter", in_host_memory=False)
    )


def make_plane(config: RunConfig, model: Decoder) -> Plane:
    """The trainer's side of the plane, for engines with their own weights."""
    system = config.system
    if system.weight_plane in ("gloo", "nccl"):
        return broadcast_plane(config, model)
    tensors, size = _publication(config, model)
    if system.weight_plane == "ipc":
        from tunesmith.run.weights.ipc import IpcPlane

        return IpcPlane(tensors, str(model.device), size)
    directory = system.engine_directory if system.weight_plane == "disk" else None
    return file_plane(tensors, directory, size)


def broadcast_plane(config: RunConfig, model: Decoder, rank: int = 0) -> BroadcastPlane:
    """A trainer rank's part of the plane; if the copy is in host memory, the first rank sends
    everything."""
    from tunesmith.run.weights.broadcast import BroadcastPlane

    system = config.system
    host = own_address(config)
    ranks = devices_of(config).ranks_per_engine
    here, (tensors, room) = stays_on_gpu(config), _publication(config, model)
    senders = devices_of(config).publishing_ranks if here else 1
    room = room if senders == 1 else room // senders + largest_bytes(model)
    if system.weight_plane == "gloo":
        return BroadcastPlane(
            tensors, "cpu", host=host, room=room, ranks=ranks, plane="gloo", group="gloo"
        )
    return BroadcastPlane(tensors, str(model.device), here, host, room, ranks, rank, senders)


def _publication(config: RunConfig, model: Decoder) -> tuple[NamedTensors, int]:
    """The weights that a run's engines get, and their bytes."""
    merged = config.system.adapter_sync != "adapter"
    as_stored = config.system.engine_kind.third_party
    tensors = published(
        model, merged=merged, as_stored=as_stored, in_host_memory=not stays_on_gpu(config)
    )
    return tensors, published_bytes(model, merged=merged)


def stays_on_gpu(config: RunConfig) -> bool:
    """Whether published weights go only from the trainer's GPU to an engine's, never to the
    host."""
    return config.system.weight_plane == "ipc" or config.system.weight_copy == "gpu"


def own_address(config: RunConfig) -> str:
    """This machine's address, as the run's other processes reach it."""
    if config.system.cluster == "none":
        return launched_address()
    from tunesmith.run.processes.ray_actor import node_address

    return node_address()


def launched_address() -> str:
    """As ``own_address``, without Ray."""
    launch = Launch.of()
    return own_address_in_launch() if launch and launch.several_machines else "127.0.0.1"


def file_plane(
    tensors: NamedTensors, directory: Path | None = None, num_bytes: int | None = None
) -> Plane:
    """A plane of files in a directory; None: in this machine's memory, or on its disk if there is
    no room.

    Args:
        num_bytes: size of all tensors; None: it is computed.
    """
    from tunesmith.run.weights.files import FilePlane, shared_directory

    size = sum(t.nbytes for _, t in tensors()) if num_bytes is None else num_bytes
    return FilePlane(tensors, shared_directory(size, directory))


def published_bytes(model: Decoder, *, merged: bool = True) -> int:
    """Bytes of ``published`` weights, with tied weights counted once and some room for
    alignment."""
    if model.adapter is not None and not merged:
        sizes = [tensor.nbytes for _, tensor in model.adapter.own_weights()]
    else:
        parameters = {id(p): p.numel() * model.dtype.itemsize for p in model.module.parameters()}
        state = model.module.state_dict()
        sizes = [
            *parameters.values(),
            *(b.nbytes for name, b in model.module.named_buffers() if name in state),
        ]
    return sum(sizes) + 2048 * len(sizes)


def largest_bytes(model: Decoder) -> int:
    """Bytes of the largest bucket of published weights."""
    largest = max((p.numel() for p in model.module.parameters()), default=0)
    return max(BUCKET, largest * model.dtype.itemsize)


def published(
    model: Decoder, *, merged: bool = True, as_stored: bool = False, in_host_memory: bool = True
) -> NamedTensors:
    """The weights that engines elsewhere need: the model's, with the adapter merged in, or only the
    adapter's.

    Quantised weights are never sent: they are not trained, and an engine quantises the same weights
    itself.

    Args:
        as_stored: use the names and shapes of the model's files, which third-party engines read;
            transformers fuses some weights, such as the experts of a mixture.
        in_host_memory: put computed weights (gathered from ranks, or summed with an adapter) in
            host memory; if False, they are on the model's device, one at a time.
    """
    from tunesmith.models.kernels.quantised import is_quantised
    from tunesmith.models.parallel.shard_files import stored_weights
    from tunesmith.models.parallel.sharding import whole_weights

    if model.adapter is not None:
        own = model.adapter.own_weights
        named: NamedTensors = (
            partial(model.adapter.merged_weights, in_host_memory=in_host_memory) if merged else own
        )
    elif model.sharding is not None:
        named = partial(whole_weights, model.module, model.dtype, in_host_memory=in_host_memory)
    else:
        named = (
            dict[str, Any]().items
            if is_quantised(model.module)
            else model.module.state_dict().items
        )
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
    return offer["plane"] == "nccl"
