"""Weights for engines on the trainer's own devices, bucket by bucket through memory that both map:
a GPU's (CUDA IPC), or on a CPU the machine's.

Each rank of the trainer that publishes has one buffer, as large as a bucket. In a round all ranks
iterate over the weights together, which gathers those of a sharded model, and each copies them into
its buffer. When it is full, the rank says what is in it; the engine processes on its device copy
the bucket out and say so, and the buffer is filled again. The next tensor is gathered meanwhile. No
rank has a second copy of the model, and an engine has one bucket beside its weights.

Since no copy is kept, a round reads the trainer's weights as they are: they may not change, and the
ranks may not compute anything else together, until all engines have read their offers. This is why
engine and trainer take turns (``system.hybrid``): an engine that is replaced has its weights before
the engines sleep and the trainer goes on.

If an engine fails in the middle, the round ends for all, but every rank gathers to the end: the
others wait for it. Which memory is mapped, and how, is the part of ``mapped``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from weakref import ref

import torch
from torch import Tensor

from tunesmith.errors import EngineError
from tunesmith.plan.devices import BUCKET
from tunesmith.run.processes.checksum import checksum
from tunesmith.run.weights.base import Offer
from tunesmith.run.weights.mapped import MappedMemory, mapped_memory
from tunesmith.run.weights.rounds import RoundMember, SendingPlane, join_round, place
from tunesmith.run.weights.spread import Run, align, put


@dataclass(slots=True)
class IpcPlane(SendingPlane):
    """The trainer's side: engines map memory of its ``device``, each process of an engine the
    buffer of the rank on its own.

    Args:
        num_bytes: bytes of all tensors.
        room: bytes of a bucket, and at least those of the largest tensor.
    """

    num_bytes: int = 0
    room: int = BUCKET
    _version: int | None = field(default=None, init=False)

    async def publish(self, version: int) -> None:
        await self._end()
        self._version = version

    async def offer(self, takers: int) -> list[Offer]:
        """See ``Plane.offer``."""
        assert self._version is not None and self.rank == 0, "nothing was published"
        await self._end()  # ranks gather for one round at a time, also for one that was withdrawn
        offer: Offer = {
            "plane": "ipc",
            "device": torch.device(self.device).type,
            "version": self._version,
            "bytes": self.num_bytes,
            "room": self.room,
        }
        return self._begin(takers, offer, {})

    def _send(self, member: RoundMember) -> None:
        """Fill the buffer and have it read, until all weights have been."""
        named = iter(self.tensors())
        memory = mapped_memory(self.device)
        try:
            self._fill(member, memory, named)
        except BaseException as error:
            with suppress(RuntimeError, OSError):  # the leader may have ended
                member.end(f"rank {self.rank} of the trainer did not send: {error}")
            deque(named, maxlen=0)  # the other ranks gather to the end, too
            raise
        memory.clean()

    def _fill(
        self, member: RoundMember, memory: MappedMemory, named: Iterator[tuple[str, Tensor]]
    ) -> None:
        readers = _readers(member, memory)
        with memory.allocated(self.room) as buffer:
            outlet = _Outlet(member, memory, buffer, readers)
            for name, tensor in named:
                outlet.put(name, tensor)
                del tensor
            outlet.end()


def _readers(member: RoundMember, memory: MappedMemory) -> int:
    """How many processes will read from this rank."""
    rank = member.rank
    member.write(f"place of rank {rank}", memory.places()[0])
    late = "not all engines found the rank on their device"
    member.until(lambda: member.count("seated") == member.takers, late)
    return member.count(f"readers of rank {rank}")


@dataclass(slots=True)
class _Outlet:
    """A rank's buffer in a round, with its ``readers``."""

    member: RoundMember
    memory: MappedMemory
    buffer: Tensor
    readers: int
    _run: Run = field(default_factory=lambda: Run(0, 0), init=False)
    """What is in the buffer."""
    _announced: int = field(default=0, init=False)
    _last: tuple[ref[Tensor], int] | None = field(default=None, init=False)
    """The last tensor and its first byte."""

    def __post_init__(self) -> None:
        handles = [self.memory.share(self.buffer) for _ in range(self.readers)]
        self.member.write(f"handles of rank {self.member.rank}", handles)

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; if the bucket is full, it goes to the readers first."""
        if self._last is not None and self._last[0]() is tensor:  # tied to the one before
            self._run.add(name, tensor, self._last[1])
            return
        assert tensor.nbytes <= self.buffer.numel(), f"no room for {name}"
        start = align(self._run.size)
        if start + tensor.nbytes > self.buffer.numel():
            self._announce()
            start = 0
        if not self._run.table:
            self._wait_for_readers()
        put(tensor, self.buffer, start)
        self._run.add(name, tensor, start)
        self._run.size = start + tensor.nbytes
        self._last = ref(tensor), start

    def end(self) -> None:
        """Send the last bucket, and say that it is the last."""
        self._announce()
        self._wait_for_readers()
        self._say(None)

    def _announce(self) -> None:
        run = self._run
        if run.table:
            # On a GPU the host waits here for the copies into the bucket.
            own = checksum(self.buffer[: run.size]) if self.readers else 0
            self._say({"size": run.size, "table": run.table, "sum": own})
            self._announced += 1
        self._run = Run(0, 0)
        self._last = None

    def _say(self, bucket: object) -> None:
        self.member.write(_bucket_key(self.member.rank, self._announced), bucket)

    def _wait_for_readers(self) -> None:
        rank = self.member.rank
        wanted = self._announced * self.readers
        copied = f"copied from rank {rank}"
        late = f"bucket {self._announced} of rank {rank} was not copied"
        self.member.until(lambda: self.member.count(copied) == wanted, late)


def take_ipc(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a round, bucket by bucket, in this process's own memory.

    A bucket is freed when the next one is requested, unless one of its tensors is kept. Once begun,
    the iteration has to reach the end: others in the round wait.

    Raises:
        EngineError: the round ended, the weights are of another version or damaged, or no rank of
            the trainer is on this process's device; some tensors may have been yielded.
    """
    with join_round(offer) as member:
        rank, mapped = _source(member, mapped_memory(offer["device"]))
        for number in count():
            bucket = member.read(_bucket_key(rank, number))
            if bucket is None:
                return
            data = mapped[: bucket["size"]].clone()
            if checksum(data) != bucket["sum"]:
                raise EngineError(f"{place(offer)}: the checksum of bucket {number} is wrong")
            member.store.add(f"copied from rank {rank}", 1)
            yield from Run(0, 0, bucket["size"], bucket["table"]).named(data)
            del data


def _source(member: RoundMember, memory: MappedMemory) -> tuple[int, Tensor]:
    """The trainer's rank on this process's device, and its buffer."""
    ranks = range(member.senders)
    places = [member.read(f"place of rank {rank}") for rank in ranks]
    own = memory.places()
    here = next((name for name in own if name in places), None)
    if here is None:
        raise EngineError(
            f"the engine's process computes on {own[0]}, and the trainer's ranks on "
            f'{", ".join(places)}: with system.weight_plane = "ipc" each engine is on the GPUs of '
            'trainer ranks; set "memory" or "nccl"'
        )
    beside = [rank for rank in ranks if places[rank] == here]
    rank = beside[member.rank % len(beside)]
    number = member.store.add(f"readers of rank {rank}", 1) - 1
    member.store.add("seated", 1)
    handle = member.read(f"handles of rank {rank}")[number]
    member.read(_bucket_key(rank, 0))  # a rank that fails before says why
    return rank, memory.opened(handle, member.offer["room"], here)


def _bucket_key(rank: int, number: int) -> str:
    return f"bucket {number} of rank {rank}"
