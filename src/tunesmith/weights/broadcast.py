"""Weights broadcast to engines over a network: gloo between CPUs, NCCL between GPUs.

Each offer to a number of engines is a round: a process group of the trainer (rank 0) and these engines, made for this
round only and separate from torch.distributed's default group. Making it takes 2 to 5 ms, and no group has to be
repaired when an engine dies or is added. Engines use the weights only after all have arrived with right checksums.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tunesmith.distributed.checksum import checksum
from tunesmith.distributed.process_group import GroupKind, open_store, process_group
from tunesmith.errors import EngineError, boundary
from tunesmith.openmp import to_thread
from tunesmith.weights.base import NamedTensors, Offer
from tunesmith.weights.flat import BUCKET, FlatWeights, flatten

REACHING = 5.0
"""Seconds to reach a round's trainer, which was there when it made the offer; not to be waited for where it died."""
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class _Round:
    """One broadcast to several engines. An engine that arrives late reads its outcome from ``store``."""

    store: dist.TCPStore
    takers: int
    """Processes: every rank of each engine."""
    withdrawn: threading.Event = field(default_factory=threading.Event)
    work: asyncio.Task[None] | None = None


@dataclass(slots=True)
class BroadcastPlane:
    """The trainer's side: ``publish`` keeps a copy in this machine's memory; ``offer`` begins a round.

    Args:
        host: address of this machine that engines can reach.
        device: that NCCL sends from.
        ranks: processes of each engine. Each of several takes by its rank in the engine's own default group.
        room: bytes of the weights, if they are made one by one.
        bucket_bytes: sent at a time, and what NCCL needs of the GPU's memory.
        patience: seconds that engines may take to come, and one bucket to arrive.
    """

    tensors: NamedTensors
    backend: GroupKind = "gloo"
    host: str = LOOPBACK
    device: str = "cuda"
    room: int = 0
    ranks: int = 1
    bucket_bytes: int = BUCKET
    patience: float = 60.0
    _flat: FlatWeights | None = field(default=None, init=False)
    _header: str = field(default="", init=False)
    _rounds: dict[int, _Round] = field(default_factory=dict[int, _Round], init=False)

    async def publish(self, version: int) -> None:
        await self._end_rounds()  # they read from the buffer, which is used again
        await to_thread(self._snapshot, version)

    async def offer(self, takers: int) -> list[Offer]:
        assert self._flat is not None, "nothing was published"
        store = open_store(self.host, self.patience)
        store.set("header", self._header)
        begun = _Round(store, takers * self.ranks)
        begun.work = asyncio.create_task(self._run(begun, self._flat.buffer.split(self.bucket_bytes)))
        self._rounds[store.port] = begun
        said = {"plane": self.backend, "version": json.loads(self._header)["version"], "host": self.host}
        said |= {"port": store.port, "world": begun.takers + 1, "patience": self.patience}
        return [{**said, "rank": 1 + taker * self.ranks, "ranks": self.ranks} for taker in range(takers)]

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            if found := self._rounds.get(offer["port"]):
                found.withdrawn.set()

    async def close(self) -> None:
        for begun in self._rounds.values():
            begun.withdrawn.set()
        await self._end_rounds()
        self._flat = None

    async def _end_rounds(self) -> None:
        await asyncio.gather(*(r.work for r in self._rounds.values() if r.work))
        self._rounds.clear()

    def _snapshot(self, version: int) -> None:
        before = self._flat
        flat = self._flat = flatten(self.tensors(), into=before.buffer if before else None, room=self.room)
        sums = [checksum(bucket) for bucket in flat.buffer.split(self.bucket_bytes)]
        said = {"version": version, "table": flat.table, "bytes": flat.buffer.numel()}
        self._header = json.dumps({**said, "bucket_bytes": self.bucket_bytes, "checksums": sums})

    async def _run(self, begun: _Round, buckets: Sequence[Tensor]) -> None:
        try:
            await to_thread(self._send, begun, buckets)
        except Exception as error:  # the takers are told; who gave out the offers hears it from them
            begun.store.set("go", f"the trainer did not send: {error}")

    def _send(self, begun: _Round, buckets: Sequence[Tensor]) -> None:
        store = begun.store
        if fault := self._wait(begun, "came"):
            store.set("go", fault)
            return
        store.set("go", "")
        group = process_group(self.backend, store, 0, begun.takers + 1, self.host, self.patience)
        for bucket in buckets:
            _broadcast(group, bucket if self.backend == "gloo" else bucket.to(self.device))
        self._wait(begun, "done")

    def _wait(self, begun: _Round, what: str) -> str | None:
        """Until as many as take have said it; why that was not, if so."""
        deadline = time.monotonic() + self.patience
        while (count := begun.store.add(what, 0)) < begun.takers:
            if begun.withdrawn.wait(0.002):
                return "another engine of this round failed"
            if time.monotonic() > deadline:
                return f"{count} of {begun.takers} processes of engines {what} within {self.patience:g} s"
        return None


def take_broadcast(offer: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a round, in this machine's memory, when all have arrived.

    Raises:
        EngineError: the round ended, or what arrived is of another version or damaged.
    """
    where = f"{offer['plane']} broadcast of version {offer['version']} from {offer['host']}:{offer['port']}"
    with boundary(EngineError, where, (RuntimeError, OSError)):  # torch.distributed's are one of these
        flat = _receive(offer, where)
    yield from flat.named()


def _receive(offer: Mapping[str, Any], where: str) -> FlatWeights:
    backend, patience = offer["plane"], offer["patience"]
    store = dist.TCPStore(offer["host"], offer["port"], None, is_master=False, timeout=timedelta(seconds=REACHING))
    store.set_timeout(timedelta(seconds=patience + 5))  # who sends gives up first, and says why
    header = json.loads(store.get("header"))
    if header["version"] != offer["version"]:
        raise EngineError(f"{where}: the weights are of version {header['version']}")
    store.add("came", 1)
    if fault := store.get("go").decode():
        raise EngineError(f"{where}: {fault}")
    try:
        rank = offer["rank"] + (dist.get_rank() if offer["ranks"] > 1 else 0)
        group = process_group(backend, store, rank, offer["world"], _own_address(offer), patience)
        flat = FlatWeights(torch.empty(header["bytes"], dtype=torch.uint8), header["table"])
        for number, (bucket, expected) in enumerate(
            zip(flat.buffer.split(header["bucket_bytes"]), header["checksums"], strict=True)
        ):
            arriving = bucket if backend == "gloo" else torch.empty_like(bucket, device="cuda")
            _broadcast(group, arriving)
            bucket.copy_(arriving)
            if checksum(bucket) != expected:
                raise EngineError(f"{where}: the checksum of bucket {number} is wrong; it was damaged on its way")
    finally:
        store.add("done", 1)
    return flat


def _own_address(offer: Mapping[str, Any]) -> str:
    """This machine's, on the way to the trainer's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((offer["host"], offer["port"]))
        return probe.getsockname()[0]


def _broadcast(group: Any, bucket: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([bucket], options).wait()
    if bucket.is_cuda:  # NCCL's wait is that of the stream
        torch.cuda.current_stream(bucket.device).synchronize()
