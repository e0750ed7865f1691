"""Weights for engines on the same GPU, which read the trainer's copy in place (CUDA IPC)."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tunesmith.errors import EngineError, boundary
from tunesmith.models.openmp import to_thread
from tunesmith.plan.devices import BUCKET
from tunesmith.run.processes.checksum import checksum
from tunesmith.run.weights.base import NamedTensors, Offer, Plane
from tunesmith.run.weights.spread import Run, Spread, spread


@dataclass(slots=True)
class IpcPlane(Plane):
    """The trainer's side: one copy of the weights on its GPU, which any number of engines on that
    GPU may read.

    Args:
        room: bytes of the weights.
    """

    tensors: NamedTensors
    device: str = "cuda"
    room: int = 0
    _kept: Spread | None = field(default=None, init=False)
    _offer: Offer = field(default_factory=dict[str, Any], init=False)

    async def publish(self, version: int) -> None:
        before = self._kept.buffer if self._kept else None
        work = partial(spread, self.tensors(), BUCKET, self.device, into=before, room=self.room)
        kept = self._kept = await to_thread(work)
        self._offer = {
            "plane": "ipc",
            "version": version,
            "gpu": _uuid(kept.buffer.device),
            "bytes": kept.buffer.numel(),
            "runs": [asdict(run) for run in kept.runs],
            "checksums": [checksum(run) for run in kept.own.values()],
        }

    async def offer(self, takers: int) -> list[Offer]:
        assert self._kept is not None, "nothing was published"
        storage: Any = self._kept.buffer.untyped_storage()
        # Each taker gets its own handle: the memory counts as in use until that handle is dropped.
        return [
            {**self._offer, "handle": [_text(part) for part in storage._share_cuda_()]}
            for _ in range(takers)
        ]

    async def close(self) -> None:
        self._kept = None


def take_ipc(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an offer, as views of the trainer's copy, which are valid until the trainer
    publishes again.

    Raises:
        EngineError: this process does not see the trainer's GPU, or the copy is not what was
            offered.
    """
    gpu = offer["gpu"]
    seen = {_uuid(number): number for number in range(torch.cuda.device_count())}
    if gpu not in seen:
        raise EngineError(
            f"the weights lie on GPU {gpu}, which the engine's process does not see: CUDA IPC "
            'works on one GPU; set system.weight_plane = "memory" or "nccl"'
        )
    device = seen[gpu]
    handle = [bytes.fromhex(p["hex"]) if isinstance(p, dict) else p for p in offer["handle"]]
    with boundary(EngineError, "cannot open the trainer's weights by CUDA IPC", RuntimeError):
        torch.cuda.init()
        storage: Any = torch.UntypedStorage._new_shared_cuda(device, *handle[1:])
        buffer = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: offer["bytes"]]
    runs = [Run(**run) for run in offer["runs"]]
    pieces = [buffer[run.start : run.start + run.size] for run in runs]
    for number, (piece, expected) in enumerate(zip(pieces, offer["checksums"], strict=True)):
        if checksum(piece) != expected:
            what = f"bucket {number} of version {offer['version']}"
            raise EngineError(f"CUDA IPC: {what} is not what was offered")
    for run, piece in zip(runs, pieces, strict=True):
        yield from run.named(piece)
    torch.cuda.synchronize(device)  # until here the trainer's copy is read


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _text(part: Any) -> Any:
    return {"hex": part.hex()} if isinstance(part, bytes) else part
