"""Process groups of rounds: one for each membership, kept for the rounds that follow.

A group is separate from torch.distributed's default group. Its members are the trainer's sending
ranks and the engines of a round. As long as the same processes meet, they use it again; if one of
them does not have it, because it was replaced or a round failed, all make a new one.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import atexit
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tunesmith.run.processes.machines import address_towards
from tunesmith.run.processes.process_group import GroupKind, process_group
from tunesmith.run.weights.rounds import RoundMember


@dataclass(frozen=True, slots=True)
class Transfer:
    """A broadcast in progress; ``work`` is None if there is nothing to send."""

    work: Any
    bucket: Tensor


@dataclass(slots=True)
class Link:
    """A process's side of a group, in a round.

    Args:
        store: where its members found each other.
        world: how many they are.
        name: the same on all members, and of no other group.
    """

    kind: GroupKind
    group: Any
    store: dist.Store
    world: int
    name: str
    member: RoundMember

    def begin(self, bucket: Tensor, sender: int = 0) -> Transfer:
        """Begin to send a tensor from one rank to all others, after those that have begun."""
        if not bucket.numel():
            return Transfer(None, bucket)
        options = dist.BroadcastOptions()
        options.rootRank = sender
        return Transfer(self.group.broadcast([bucket], options), bucket)

    def finish(self, transfer: Transfer) -> Tensor:
        """The tensor, once it has arrived; on a GPU, work queued after this may use it.

        Raises:
            ConnectionError: the round was ended, or the tensor did not arrive in time.
            RuntimeError: the connection failed.
        """
        work = transfer.work
        if work is not None:
            self.member.until(work.is_completed, f"{transfer.bucket.nbytes} bytes did not arrive")
            work.wait(timedelta(seconds=self.member.patience))  # raises any error
        return transfer.bucket

    def broadcast(self, bucket: Tensor, sender: int = 0) -> Tensor:
        """``begin`` and ``finish``."""
        return self.finish(self.begin(bucket, sender))

    def close(self) -> None:
        """Leave the group: others can read nothing more from this process."""
        if self.kind == "nccl":
            self.group.abort()  # nothing is in progress, or it has to end
        self.group = None  # gloo disconnects only here; an error's traceback may keep this object


_kept: dict[tuple[str, int], Link] = {}
"""This process's links after their last round, by the plane that makes the offers and the rank."""


@contextmanager
def linked(member: RoundMember) -> Generator[Link]:
    """The group of a round's members. It is kept, unless this process fails in the round."""
    key = member.offer["source"], member.rank
    kept = _kept.pop(key, None)
    again = _all_have(member, kept)
    if not again:
        if kept:
            kept.close()
        close_links(key[0])  # this process had another rank in a round before
    link = kept if kept and again else _new_link(member)
    link.member = member
    try:
        yield link
    except BaseException:
        link.close()
        raise
    before = _kept.pop(key, None)  # of a round that went on at the same time
    _kept[key] = link
    if before is not None:
        before.close()


def close_links(source: str | None = None) -> None:
    """Leave the groups that were made for a plane's offers, or all."""
    for key in [key for key in list(_kept) if source in (None, key[0])]:
        link = _kept.pop(key, None)  # another thread may have taken it
        if link is not None:
            link.close()


atexit.register(close_links)


def _all_have(member: RoundMember, link: Link | None) -> bool:
    """Whether all members of a round have the leader's link, and no other process has."""
    world = member.offer["world"]
    own = link.name if link and link.world == world else ""
    if member.rank == 0:
        member.write("link", own)
    if not own or member.read("link") != own:
        member.store.add("strangers", 1)
    member.store.add("compared", 1)
    late = f"not all of {world} processes said which group they have"
    member.until(lambda: member.count("compared") == world, late)
    return not member.count("strangers")


def _new_link(member: RoundMember) -> Link:
    offer = member.offer
    rank = member.rank
    kind: GroupKind = offer["group"]
    host: str = offer["host"]
    world: int = offer["world"]
    own = address_towards(host, offer["port"]) if rank else host
    group = process_group(kind, member.store, rank, world, own, member.patience, vital=False)
    # The store is open as long as one of the links made in it, so its port is nobody else's.
    return Link(kind, group, member.store, world, f"{host}:{offer['port']}", member)
