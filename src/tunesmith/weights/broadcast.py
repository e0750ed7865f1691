"""Weights broadcast to engines over a network, from one machine's memory to others' (gloo).

Each offer is a round (``weights.rounds``). Engines use the weights only after all have arrived with correct checksums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tunesmith.distributed.checksum import checksum
from tunesmith.errors import EngineError
from tunesmith.openmp import to_thread
from tunesmith.weights.base import NamedTensors, Offer
from tunesmith.weights.flat import BUCKET, FlatWeights, flatten
from tunesmith.weights.rounds import LOOPBACK, Link, Rounds, joined, place


@dataclass(slots=True)
class BroadcastPlane:
    """The trainer's side: ``publish`` keeps a copy in this machine's memory; ``offer`` begins a round.

    Args:
        host: address of this machine that engines can reach.
        room: bytes of the weights, if they are produced one by one.
        ranks: processes per engine. If there are several, each receives by its rank in the engine's default group.
        bucket_bytes: bytes sent at a time.
        patience: seconds that engines may take to join, and one bucket to arrive.
    """

    tensors: NamedTensors
    host: str = LOOPBACK
    room: int = 0
    ranks: int = 1
    bucket_bytes: int = BUCKET
    patience: float = 60.0
    _flat: FlatWeights | None = field(default=None, init=False)
    _header: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    _rounds: Rounds = field(init=False)

    def __post_init__(self) -> None:
        self._rounds = Rounds("gloo", "gloo", self.host, self.ranks)

    async def publish(self, version: int) -> None:
        await self._rounds.end()  # rounds read from the buffer, which is reused
        await to_thread(self._snapshot, version)

    async def offer(self, takers: int) -> list[Offer]:
        assert self._flat is not None, "nothing was published"
        buckets = self._flat.buffer.split(self.bucket_bytes)

        def send(link: Link) -> None:
            for bucket in buckets:
                link.broadcast(bucket)

        return self._rounds.begin(takers, self._header, self.patience, send)

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        self._rounds.withdraw(offers)

    async def close(self) -> None:
        await self._rounds.end(now=True)
        self._flat = None

    def _snapshot(self, version: int) -> None:
        before = self._flat
        flat = self._flat = flatten(self.tensors(), into=before.buffer if before else None, room=self.room)
        sums = [checksum(bucket) for bucket in flat.buffer.split(self.bucket_bytes)]
        said = {"version": version, "table": flat.table, "bytes": flat.buffer.numel()}
        self._header = {**said, "bucket_bytes": self.bucket_bytes, "checksums": sums}


def take_broadcast(offer: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a round in this machine's memory, once all have arrived.

    Raises:
        EngineError: the round ended, or the weights are of another version or damaged.
    """
    with joined(offer) as link:
        flat = _receive(link, place(offer))
    yield from flat.named()


def _receive(link: Link, where: str) -> FlatWeights:
    header = link.header
    flat = FlatWeights(torch.empty(header["bytes"], dtype=torch.uint8), header["table"])
    buckets = flat.buffer.split(header["bucket_bytes"])
    for number, (bucket, expected) in enumerate(zip(buckets, header["checksums"], strict=True)):
        link.broadcast(bucket)
        if checksum(bucket) != expected:
            raise EngineError(f"{where}: the checksum of bucket {number} is wrong; it was damaged on its way")
    return flat
