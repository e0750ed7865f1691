"""Rounds: an offer of weights to some engines is a meeting of the trainer's sending ranks (rank 0
leads) and these engines.

The trainer opens a store for each round: there it describes the weights, the others report that
they have joined and that they are done, and each side says why it ends early. How the bytes travel
is the plane's part: over a process group (``links``) or through mapped memory (``ipc``).
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tunesmith.errors import EngineError, TunesmithError, boundary
from tunesmith.models.openmp import to_thread
from tunesmith.run.processes.process_group import REACHING, open_store
from tunesmith.run.weights.base import NamedTensors, Offer

LOOPBACK = "127.0.0.1"
WITHDRAWN = "another engine of this round failed"
POLL = 0.0002
"""Seconds between checks whether the others have come as far."""
ASKING = 0.05
"""Seconds between checks whether the round continues."""

GO = "go"
"""The answer to those who have come, if all have. It is given once: ranks that gather weights
together act on the same one."""

Header = Mapping[str, Any]
"""Describes the weights of a round."""


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One process's side of a running round.

    Args:
        rank: its rank in the round; the trainer's sending ranks are the first.
    """

    store: dist.Store
    offer: Offer
    rank: int
    header: Header

    @property
    def senders(self) -> int:
        return self.offer["senders"]

    @property
    def takers(self) -> int:
        return self.offer["world"] - self.senders

    @property
    def patience(self) -> float:
        """Seconds that each wait may take."""
        return self.offer["patience"]

    def stopped(self) -> str | None:
        """Why a process of the round has ended it; None if none has."""
        return _fault(self.store)

    def end(self, why: str) -> None:
        """End the round for all, unless it has ended."""
        _end(self.store, why)

    def count(self, what: str) -> int:
        """How many processes have reported ``what``."""
        return self.store.add(what, 0)

    def until(self, done: Callable[[], bool], late: str) -> None:
        """Wait until ``done()``.

        Raises:
            ConnectionError: the round was ended, or it takes longer than ``patience``, which
                ``late`` describes.
        """
        asked = started = time.monotonic()
        while not done():
            time.sleep(POLL)
            now = time.monotonic()
            if now - started > self.patience:
                raise ConnectionError(f"{late} within {self.patience:g} s")
            if now - asked > ASKING:
                asked = now
                why = self.stopped()
                if why:
                    raise ConnectionError(why)

    def read(self, key: str) -> Any:
        """What another process has written; waits for it."""
        self.until(lambda: self.store.check([key]), f"nothing was said of {key}")
        return json.loads(self.store.get(key))

    def write(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(value))


@dataclass(slots=True)
class Round:
    """One transfer to several engines, led by the trainer's first rank. It begins at once.

    An engine that arrives late reads its outcome from the store.

    Args:
        offer: what the offers to all engines say; ``world`` counts the trainer's ranks that send,
            and every rank of each engine.
        header: describes the weights to takers; plain values, including a ``version``.
        send: this rank's part, on a thread.
    """

    offer: Offer
    header: Header
    send: Callable[[RoundMember], None]
    store: dist.TCPStore = field(init=False)
    work: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.store = open_store(self.offer["host"], self.offer["patience"])
        self.store.set("header", json.dumps(self.header))
        self.offer = {**self.offer, "port": self.store.port}
        self.work = asyncio.create_task(self._run())

    def withdraw(self) -> None:
        """End the round: an engine that was offered the weights has failed."""
        _end(self.store, WITHDRAWN)

    async def _run(self) -> None:
        try:
            await to_thread(self._lead)
        except Exception as error:  # the takers are told, and report it to whoever made the offers
            why = f"the trainer did not send: {error}"
            _end(self.store, why)
            self.store.compare_set("go", "", why)

    def _lead(self) -> None:
        fault = self._wait("came")
        self.store.set("go", fault or GO)
        if not fault:
            self.send(RoundMember(self.store, self.offer, 0, self.header))
            self._wait("done")  # until then they read the weights

    def _wait(self, what: str) -> str | None:
        """Wait until all others have reported ``what``; returns the reason if they have not."""
        others = self.offer["world"] - 1
        patience = self.offer["patience"]
        deadline = time.monotonic() + patience
        while (count := self.store.add(what, 0)) < others:
            why = _fault(self.store)
            if why:
                return why
            if time.monotonic() > deadline:
                return f"{count} of {others} processes {what} within {patience:g} s"
            time.sleep(0.002)
        return None


@dataclass(slots=True)
class SendingPlane(ABC):
    """The trainer's side of rounds, on each rank that sends; only the first one makes offers.

    Args:
        device: this rank's device.
        host: address of this machine that engines can reach.
        ranks: processes per engine.
        rank: this rank, of ``senders`` that publish together; the others join a round as takers do.
        patience: seconds that engines may take to join, and to get one bucket.
    """

    tensors: NamedTensors
    device: str = "cuda"
    _: KW_ONLY
    host: str = LOOPBACK
    ranks: int = 1
    rank: int = 0
    senders: int = 1
    patience: float = 60.0
    _rounds: dict[int, Round] = field(default_factory=dict[int, Round], init=False)
    """The rounds in progress that this rank leads, by the port of their store."""
    _helping: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"], init=False)
    """Its parts in the rounds of the first rank."""

    @abstractmethod
    def _send(self, member: RoundMember) -> None:
        """Send this rank's part of the weights in a round."""

    def _begin(self, takers: int, offer: Offer, header: Header) -> list[Offer]:
        """Begin a round; returns the offer of each engine, with the rank of its first process. If
        there are several senders, each of the others must ``help`` with the first offer."""
        members = {
            "host": self.host,
            "world": self.senders + takers * self.ranks,
            "senders": self.senders,
            "ranks": self.ranks,
            "patience": self.patience,
        }
        header = {**header, "version": offer["version"]}
        begun = Round({**offer, **members}, header, self._send)
        self._rounds[begun.store.port] = begun
        firsts = (self.senders + taker * self.ranks for taker in range(takers))
        return [{**begun.offer, "rank": first} for first in firsts]

    async def help(self, offer: Offer) -> None:
        """Send this rank's part in a round that the first rank has begun."""
        task = asyncio.create_task(to_thread(self._help, {**offer, "rank": self.rank, "ranks": 1}))
        self._helping.add(task)
        task.add_done_callback(self._helping.discard)

    def _help(self, offer: Offer) -> None:
        with suppress(TunesmithError), join_round(offer) as member:  # the takers report failures
            self._send(member)

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        """See ``Plane.withdraw``."""
        for offer in offers:
            if offer["port"] in self._rounds:
                self._rounds[offer["port"]].withdraw()

    async def close(self, *, helping: bool = True) -> None:
        """See ``Plane.close``. Args: helping: as in ``_end``."""
        for begun in self._rounds.values():
            begun.withdraw()
        await self._end(helping=helping)

    async def _end(self, *, helping: bool = True) -> None:
        """Wait for the end of the rounds that this rank leads, and of those in which it helps."""
        helped = self._helping if helping else ()
        await asyncio.gather(*(begun.work for begun in self._rounds.values()), *helped)
        self._rounds.clear()


@contextmanager
def join_round(offer: Offer) -> Generator[RoundMember]:
    """A taker's side of an offered round, or that of another sending rank of the trainer.

    Raises:
        EngineError: the round ended, or is of another version; torch.distributed failed inside.
    """
    where = place(offer)
    # torch.distributed raises one of these.
    with boundary(EngineError, where, (RuntimeError, OSError)):
        reaching = timedelta(seconds=REACHING)
        store = dist.TCPStore(offer["host"], offer["port"], None, is_master=False, timeout=reaching)
        # The sender gives up first, and says why.
        store.set_timeout(timedelta(seconds=offer["patience"] + 5))
        header = json.loads(store.get("header"))
        if header["version"] != offer["version"]:
            raise EngineError(f"{where}: the weights are of version {header['version']}")
        store.add("came", 1)
        answer = store.get("go").decode()
        if answer != GO:
            raise EngineError(f"{where}: {answer}")
        rank = offer["rank"] + (dist.get_rank() if offer["ranks"] > 1 else 0)
        try:
            yield RoundMember(store, offer, rank, header)
            if rank < offer["senders"]:
                _wait_for_takers(store, offer)
        except BaseException as error:
            with suppress(RuntimeError, OSError):  # the trainer may have ended
                _end(store, f"rank {rank} of the round failed: {error}")
            raise
        finally:
            with suppress(RuntimeError, OSError):
                store.add("done", 1)


def _fault(store: dist.Store) -> str | None:
    """Why a process of the round has ended it; None if none has."""
    return store.get("fault").decode() if store.check(["fault"]) else None


def _end(store: dist.Store, why: str) -> None:
    """End a round, unless it has ended: the first reason is kept."""
    store.compare_set("fault", "", why)


def _wait_for_takers(store: dist.Store, offer: Offer) -> None:
    """Wait until the takers are done, as they may still be reading the weights."""
    deadline = time.monotonic() + offer["patience"]
    while store.add("done", 0) < offer["world"] - offer["senders"] and time.monotonic() < deadline:
        if _fault(store):
            return
        time.sleep(0.002)


def place(offer: Offer) -> str:
    """A description of an offered round."""
    way = "buckets by ipc" if offer["plane"] == "ipc" else f"{offer['plane']} broadcast"
    return f"{way} of version {offer['version']} from {offer['host']}:{offer['port']}"
