"""Weights broadcast from the trainer to engines: between GPUs (NCCL), or between machines' memories
(gloo).

``publish`` copies the weights: with NCCL on the trainer's GPU, or into host memory if
``system.weight_copy = "host"``; with gloo always into host memory. If the ranks of a sharded
trainer copy on their GPUs, each rank that takes part in the all-gather keeps and sends some of the
tensors: no rank has a whole second copy. The published weights have to be kept, because a
replacement for a lost engine may need them at any time, even in the middle of an optimizer step,
when the model's weights have changed and the ranks of a sharded trainer cannot gather them. So
gathering ends before sending begins; over NVLink it takes about a tenth of what sending takes.

With NCCL an engine keeps no second copy: it writes each bucket over its weights as it arrives. If a
round fails midway, its weights are of no single version, and it takes no step until it has loaded
others (``RolloutEngine``). With gloo an engine uses the weights only after all have arrived and
been checked.

Integrity: NCCL, gloo and the links below them retransmit or fail; they do not lose bytes. Possible
faults are a wrong order of streams, memory reused too early, or a table of another version. To
detect these, each bucket has a position-dependent sum of its words (``checksum.word_sum``), which
the sender's device computes when it copies and each engine's device when it receives; the sums
follow the last bucket, and the engine's host reads once whether all agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from uuid import uuid4

import torch
from torch import Tensor

from tunesmith.errors import EngineError
from tunesmith.models.openmp import to_thread
from tunesmith.plan.devices import BUCKET
from tunesmith.run.processes.checksum import word_sum
from tunesmith.run.processes.process_group import GroupKind
from tunesmith.run.weights.base import Offer
from tunesmith.run.weights.links import Link, Transfer, close_links, linked
from tunesmith.run.weights.rounds import RoundMember, SendingPlane, join_round, place
from tunesmith.run.weights.spread import Run, Spread, spread

AHEAD = 2
"""Buckets in transfer at a time: one more is on its way while one is written or fetched."""


@dataclass(slots=True)
class BroadcastPlane(SendingPlane):
    """The trainer's side. Several processes of an engine each receive by their rank in the engine's
    default group.

    Args:
        on_device: keep the copy on the device; otherwise in host memory, and each bucket is moved
            there to be sent.
        room: bytes of this rank's copy.
        bucket_bytes: bytes of whole tensors sent at a time; a larger tensor is sent by itself.
        plane: ``nccl`` or ``gloo``, which tells engines how to receive.
        group: the backend; gloo stands in for NCCL if there is no GPU.
    """

    on_device: bool = True
    room: int = 0
    bucket_bytes: int = BUCKET
    plane: str = "nccl"
    group: GroupKind = "nccl"
    _version: int = field(default=0, init=False)
    _kept: Spread | None = field(default=None, init=False)
    _sums: dict[int, Tensor] = field(default_factory=dict[int, Tensor], init=False)
    """The checksum of each run that this rank keeps on the device."""
    _source: str = field(default_factory=lambda: uuid4().hex, init=False)

    async def publish(self, version: int) -> None:
        await self._end()  # they read from the copy, which is overwritten
        await to_thread(self._copy, version)

    async def offer(self, takers: int) -> list[Offer]:
        """See ``Plane.offer``."""
        kept = self._kept
        assert kept is not None and self.rank == 0, "nothing was published"
        # Tables are not copied.
        runs = [{f.name: getattr(run, f.name) for f in fields(run)} for run in kept.runs]
        header = {"runs": runs, "device": torch.device(self.device).type}
        offer: Offer = {
            "plane": self.plane,
            "group": self.group,
            "source": self._source,
            "version": self._version,
            "bytes": sum(run.size for run in kept.runs),
        }
        return self._begin(takers, offer, header)

    async def close(self, *, helping: bool = False) -> None:
        await SendingPlane.close(self, helping=helping)
        close_links(self._source)
        self._kept = None

    def _copy(self, version: int) -> None:
        kept = self._kept = spread(
            self.tensors(),
            self.bucket_bytes,
            self.device if self.on_device else "cpu",
            rank=self.rank,
            ranks=self.senders,
            into=self._kept.buffer if self._kept else None,
            room=self.room,
        )
        summed = kept.own if self.on_device else {}
        self._sums = {number: word_sum(run) for number, run in summed.items()}
        self._version = version
        if kept.buffer.is_cuda:  # from here on the weights may change
            torch.cuda.current_stream(kept.buffer.device).synchronize()

    def _send(self, member: RoundMember) -> None:
        with linked(member) as link:
            self._send_over(link)

    def _send_over(self, link: Link) -> None:
        """Send the runs that this rank keeps, and receive but ignore those of others."""
        kept = self._kept
        assert kept is not None, "a round ends before the plane is closed"
        sums = dict(self._sums)
        under_way = deque[Transfer]()
        for number, run in enumerate(kept.runs):
            bucket = kept.own.get(number)
            if bucket is None:
                bucket = torch.empty(run.size, dtype=torch.uint8, device=self.device)
            elif not self.on_device:
                bucket = bucket.to(self.device)
                sums[number] = word_sum(bucket)
            under_way.append(link.begin(bucket, run.owner))
            del bucket
            if len(under_way) == AHEAD:
                link.finish(under_way.popleft())
        for transfer in under_way:
            link.finish(transfer)
        for owner, numbers in _shares(kept.runs):
            own = torch.stack([sums[n] for n in numbers]) if owner == self.rank else None
            link.broadcast(_empty_sums(numbers, self.device) if own is None else own, owner)


def take_broadcast(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a round: with NCCL on the GPU as they arrive, with gloo in memory once all
    have arrived.

    Raises:
        EngineError: the round ended, or the weights are of another version or damaged; with NCCL,
            some may have been yielded.
    """
    yield from _arriving(offer) if offer["plane"] == "nccl" else list(_arriving(offer))


def _arriving(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a round, bucket by bucket; the next one is on its way meanwhile.

    A bucket is freed when the next one is requested, unless one of its tensors is kept. Once begun,
    the iteration has to reach the end: others in the round wait, and only then is it known that all
    tensors were right.
    """
    with join_round(offer) as member, linked(member) as link:
        runs = [Run(**run) for run in member.header["runs"]]
        device = member.header["device"]
        sums = list[Tensor]()
        for run, bucket in _buckets(link, runs, device):
            sums.append(word_sum(bucket))
            yield from run.named(bucket)
            del bucket
        right = torch.ones((), dtype=torch.bool, device=device)
        for owner, numbers in _shares(runs):
            sent = link.broadcast(_empty_sums(numbers, device), owner)
            right &= (torch.stack([sums[n] for n in numbers]) == sent).all()
        if not bool(right):
            damaged = "a checksum is wrong; the weights were damaged on their way"
            raise EngineError(f"{place(offer)}: {damaged}")


def _buckets(link: Link, runs: Sequence[Run], device: str) -> Iterator[tuple[Run, Tensor]]:
    """Each run with its bytes, as they arrive."""
    under_way = deque[tuple[Run, Transfer]]()
    for run in runs:
        bucket = torch.empty(run.size, dtype=torch.uint8, device=device)
        under_way.append((run, link.begin(bucket, run.owner)))
        del bucket
        if len(under_way) == AHEAD:
            yield _arrived(link, *under_way.popleft())
    while under_way:
        yield _arrived(link, *under_way.popleft())


def _arrived(link: Link, run: Run, transfer: Transfer) -> tuple[Run, Tensor]:
    return run, link.finish(transfer)


def _shares(runs: Sequence[Run]) -> Iterator[tuple[int, list[int]]]:
    """Each rank that keeps runs, with the numbers of its runs."""
    for owner in sorted({run.owner for run in runs}):
        yield owner, [number for number, run in enumerate(runs) if run.owner == owner]


def _empty_sums(numbers: Sequence[int], device: str) -> Tensor:
    return torch.empty(len(numbers), dtype=torch.int64, device=device)
