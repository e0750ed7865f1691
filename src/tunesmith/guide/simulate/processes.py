"""Simulated processes of a run: the first of each role runs in this process, and the others copy
its answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

from tunesmith.config.system import Role
from tunesmith.guide.simulate.threads import FIRST, Occupant, inside
from tunesmith.learn.usercode.far import Far, Lost, PendingResult
from tunesmith.learn.usercode.host import Host
from tunesmith.run.processes.local import Placed, Starter


class FakeProcesses(Starter):
    """Processes that are in this one; others of a role answer as the first one, which gets the same
    requests.

    Args:
        gpu: returns the name of the GPU that the first process of a role is on.
        judges: number of processes per reward model.
    """

    def __init__(self, gpu: Callable[[Role], str] = lambda _: FIRST, judges: int = 1) -> None:
        super().__init__()
        self._gpu = gpu
        self._judges = judges
        self._numbers = Counter[Role]()
        self._first: dict[Role, _OnThreads] = {}

    def _start(self, role: Role, lost: Lost, python: Path | None) -> Placed:
        del python
        number = self._numbers[role]
        self._numbers[role] += 1
        if number % self._judges if role == "reward" else number:
            return _LikeAnother(self._first[role], lost), number
        with inside(Occupant(self._gpu(role), role)):
            far = self._first[role] = _OnThreads(f"the first process of role '{role}'", lost)
        return far, number


class _Inside(Far):
    """A far object that needs no watching, because it is in this process."""

    def __init__(self, name: str, lost: Lost) -> None:
        super().__init__(name, lost, patience=None)

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        self._settle(number, None if error else done.result(), error)


class _OnThreads(_Inside):
    """An object with its own threads, as in a separate process."""

    def __init__(self, name: str, lost: Lost) -> None:
        super().__init__(name, lost)
        self.newest: PendingResult
        """The answer to the last request."""
        self._loop = asyncio.new_event_loop()
        self._worker = ThreadPoolExecutor(1, name)
        self._host = Host(self._worker)
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def _ask(self, do: str, *given: object) -> PendingResult:
        self.newest = super()._ask(do, *given)
        return self.newest

    def _send(self, number: int, do: str, *given: object) -> None:
        asked = asyncio.run_coroutine_threadsafe(self._host.ask(do, *given), self._loop)
        asked.add_done_callback(lambda done: self._answer(number, done))

    def _kill(self) -> None:
        self._worker.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _LikeAnother(_Inside):
    """Answers as another object does, which gets the same requests first."""

    def __init__(self, other: _OnThreads, lost: Lost) -> None:
        super().__init__(f"one like {other.name}", lost)
        self._other = other

    def _send(self, number: int, do: str, *given: object) -> None:
        del do, given
        self._other.newest.add_done_callback(lambda done: self._answer(number, done))

    def _kill(self) -> None: ...
