"""Which weight plane a run uses, and how an engine reads what one offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import RunConfig
from tunesmith.weights.base import NamedTensors, Offer, Plane

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.models.decoder import Decoder


class NoPlane:
    """Of engines that keep the weights they were started with."""

    async def publish(self, version: int) -> None: ...

    async def offer(self, takers: int) -> list[Offer]:
        return [{}] * takers

    async def withdraw(self, offers: Sequence[Offer]) -> None: ...

    async def close(self) -> None: ...


def make_plane(config: RunConfig, model: Decoder) -> Plane:
    """The trainer's side, for engines with weights of their own."""
    system = config.system
    own = system.engine == "local"
    tensors = published(model, merged=system.adapter_sync != "adapter", as_stored=not own)
    if system.weight_plane == "ipc":
        from tunesmith.weights.ipc import IpcPlane

        return IpcPlane(tensors, str(model.device))
    if system.weight_plane in ("gloo", "nccl"):
        from tunesmith.weights.broadcast import BroadcastPlane

        return BroadcastPlane(tensors, system.weight_plane, own_address(config), str(model.device))
    return file_plane(tensors, system.engine_directory if system.weight_plane == "disk" else None)


def own_address(config: RunConfig) -> str:
    """This machine's address, as the run's other processes reach it."""
    if config.system.cluster == "none":
        return "127.0.0.1"
    from tunesmith.distributed.ray_actor import node_address

    return node_address()


def file_plane(tensors: NamedTensors, directory: Path | None = None) -> Plane:
    """Files in a directory; None: in this machine's memory, or on its disk where there is no room."""
    from tunesmith.weights.files import FilePlane, shared_directory

    return FilePlane(tensors, shared_directory(sum(t.nbytes for _, t in tensors()), directory))


def published(model: Decoder, *, merged: bool = True, as_stored: bool = False) -> NamedTensors:
    """What engines elsewhere need of a model: its weights, those with the adapter in them, or the adapter's alone.

    Quantised weights are never sent: no one trains them, and an engine quantises the same ones.

    Args:
        as_stored: under the names and in the shapes of the model's files, which engines of others read; transformers
            fuses some, such as the experts of a mixture.
    """
    from tunesmith.models.loading import stored_weights
    from tunesmith.models.quantised import is_quantised

    if model.adapter is not None:
        named: NamedTensors = model.adapter.merged_weights if merged else model.adapter.own_weights
    else:
        named = dict[str, Any]().items if is_quantised(model.module) else model.module.state_dict().items
    return (lambda: stored_weights(model.module, named())) if as_stored else named


def read_offer(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The engine's side: the weights of an offer, a few at a time."""
    match offer["plane"]:
        case "gloo" | "nccl":
            from tunesmith.weights.broadcast import take_broadcast as take
        case "ipc":
            from tunesmith.weights.ipc import take_ipc as take
        case _:
            from tunesmith.weights.files import take_file as take
    return take(offer)
