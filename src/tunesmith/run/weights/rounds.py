"""Rounds: each offer of weights to some engines is a process group of the trainer (rank 0) and
these engines.

A group is made for its round only, separate from torch.distributed's default group. Making one
takes milliseconds, and none has to be repaired when an engine dies or is added. The trainer opens a
store for each round: there it describes the weights, takers report that they have joined and that
they are done, and each side says why it ends early.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tunesmith.errors import EngineError, boundary
from tunesmith.models.openmp import to_thread
from tunesmith.run.processes.machines import address_towards
from tunesmith.run.processes.process_group import GroupKind, open_store, process_group
from tunesmith.run.weights.base import Offer

REACHING = 5.0
"""Seconds to reach a round's trainer. It was there when it made the offer; if it has died, waiting
is useless."""
LOOPBACK = "127.0.0.1"
WITHDRAWN = "another engine of this round failed"
POLL = 0.0002
ASKING = 0.05
"""Seconds between checks whether a bucket has arrived, and between checks whether the round
continues."""


Header = Mapping[str, Any]
"""Describes the weights of a round."""


@dataclass(slots=True)
class Link:
    """One process's side of a running round.

    Args:
        stopped: returns why the round ends early, or None; called every ``ASKING`` seconds during a
            broadcast.
    """

    kind: GroupKind
    group: Any
    header: Header
    patience: float
    stopped: Callable[[], str | None]

    def broadcast(self, bucket: Tensor, sender: int = 0) -> None:
        """Send a tensor from one rank to all others; on a GPU, work queued after this may use it.

        Raises:
            ConnectionError: the round was ended, or the tensor did not arrive in time.
            RuntimeError: the connection failed.
        """
        if not bucket.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = sender
        work = self.group.broadcast([bucket], options)
        asked = started = time.monotonic()
        late = f"{bucket.nbytes} bytes did not arrive within {self.patience:g} s"
        while not work.is_completed():
            time.sleep(POLL)
            now = time.monotonic()
            if now - started > self.patience:
                raise ConnectionError(late)
            if now - asked > ASKING:
                asked = now
                why = self.stopped()
                if why:
                    raise ConnectionError(why)
        work.wait(timedelta(seconds=self.patience))  # raises any error

    def close(self) -> None:
        """Leave the round: others can read nothing more from this process."""
        if self.kind == "nccl":
            self.group.abort()  # nothing is in progress, or it has to end
        self.group = None  # gloo disconnects only here; an error's traceback may keep this object


Send = Callable[[Link], None]
"""The trainer's part of a round, on a thread."""


@dataclass(slots=True)
class Round:
    """One broadcast to several engines, led by the trainer's first rank. It begins at once.

    An engine that arrives late reads its outcome from the store.

    Args:
        offer: what the offers to all engines say; ``world`` counts the trainer's ranks that send,
            and every rank of each engine.
        header: describes the weights to takers; plain values, including a ``version``.
    """

    offer: Offer
    header: Header
    send: Send
    store: dist.TCPStore = field(init=False)
    withdrawn: threading.Event = field(default_factory=threading.Event, init=False)
    work: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.store = open_store(self.offer["host"], self.offer["patience"])
        self.store.set("header", json.dumps(self.header))
        self.offer = {**self.offer, "port": self.store.port}
        self.work = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await to_thread(self._lead)
        except Exception as error:  # the takers are told, and report it to whoever made the offers
            for key in ("go", "fault"):
                self.store.set(key, f"the trainer did not send: {error}")

    def _lead(self) -> None:
        fault = self._wait("came")
        if fault:
            self.store.set("go", fault)
            return
        self.store.set("go", "")
        link = _link(self.store, self.offer, 0, self.offer["host"], self.header, self._stopped)
        try:
            self.send(link)
            self._wait("done")  # until then they read the weights
        finally:
            link.close()

    def _wait(self, what: str) -> str | None:
        """Wait until all others have reported ``what``; returns the reason if they have not."""
        others = self.offer["world"] - 1
        patience = self.offer["patience"]
        deadline = time.monotonic() + patience
        while (count := self.store.add(what, 0)) < others:
            if self.withdrawn.wait(0.002):
                return WITHDRAWN
            if time.monotonic() > deadline:
                return f"{count} of {others} processes {what} within {patience:g} s"
        return None

    def _stopped(self) -> str | None:
        return WITHDRAWN if self.withdrawn.is_set() else _fault(self.store)


def _link(
    store: dist.Store,
    offer: Offer,
    rank: int,
    host: str,
    header: Header,
    stopped: Callable[[], str | None],
) -> Link:
    """Join a round's group as ``rank``; ``host`` is this machine's address."""
    kind: GroupKind = offer["group"]
    patience: float = offer["patience"]
    group = process_group(kind, store, rank, offer["world"], host, patience, vital=False)
    return Link(kind, group, header, patience, stopped)


@contextmanager
def join_round(offer: Offer) -> Generator[Link]:
    """A taker's side of an offered round, or that of another sending rank of the trainer.

    Raises:
        EngineError: the round ended, or is of another version; torch.distributed failed inside.
    """
    where = place(offer)
    host: str = offer["host"]
    port: int = offer["port"]
    # torch.distributed raises one of these.
    with boundary(EngineError, where, (RuntimeError, OSError)):
        reaching = timedelta(seconds=REACHING)
        store = dist.TCPStore(host, port, None, is_master=False, timeout=reaching)
        # The sender gives up first, and says why.
        store.set_timeout(timedelta(seconds=offer["patience"] + 5))
        header = json.loads(store.get("header"))
        if header["version"] != offer["version"]:
            raise EngineError(f"{where}: the weights are of version {header['version']}")
        store.add("came", 1)
        fault = store.get("go").decode()
        if fault:
            raise EngineError(f"{where}: {fault}")
        rank = offer["rank"] + (dist.get_rank() if offer["ranks"] > 1 else 0)
        link = None
        try:
            own = address_towards(host, port)
            link = _link(store, offer, rank, own, header, partial(_fault, store))
            yield link
            if rank < offer["senders"]:
                _wait_for_takers(store, offer)
        except BaseException as error:
            with suppress(RuntimeError, OSError):  # the trainer may have ended
                store.set("fault", f"rank {rank} of the round failed: {error}")
            raise
        finally:
            with suppress(RuntimeError, OSError):
                store.add("done", 1)
            if link:
                link.close()


def _fault(store: dist.Store) -> str | None:
    """Why a process of the round has ended it; None if none has."""
    return store.get("fault").decode() if store.check(["fault"]) else None


def _wait_for_takers(store: dist.Store, offer: Offer) -> None:
    """Wait until the takers are done, as they may still be reading the weights."""
    deadline = time.monotonic() + offer["patience"]
    while store.add("done", 0) < offer["world"] - offer["senders"] and time.monotonic() < deadline:
        if _fault(store):
            return
        time.sleep(0.002)


def place(offer: Offer) -> str:
    """A description of an offered round."""
    what = f"{offer['plane']} broadcast of version {offer['version']}"
    return f"{what} from {offer['host']}:{offer['port']}"
