"""Idle OpenMP workers: GNU OpenMP gives each thread that computes a team, which spins while it has
nothing to do.

By default a worker spins for some milliseconds before it sleeps, which is longer than the pauses
between the operations of a step. While other programs use the cores, it takes the time of those it
waits for: training with two threads on two busy cores then takes many times as long as with one.

While a process has more OpenMP threads than there are cores, libgomp no longer spins at the end of
a parallel region but sleeps at once, which takes up to a fifth longer on idle cores. So a thread
that hands over to another ends its team; a new one is made in about 0.1 ms when the thread computes
again. While threads wait for cores, :func:`watch_cores` keeps such threads in reserve.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

T = TypeVar("T")
SOFT = 1
"""``omp_pause_soft``: keep the settings, such as the number of threads."""


TASKS = Path("/proc/self/task")
INTERVAL = 0.5
"""Seconds between two readings of how long threads waited for cores; one takes 0.7 ms."""
FREE = 0.025
"""Seconds per second that each thread of a team is ready and has no core: on idle cores at most so
many; beside one busy program on each core 0.1 to 0.5."""
CROWDED = 0.1
"""What all threads together wait beyond that, where cores are taken."""
CALM = 6
"""Readings in a row, none above ``FREE``, after which cores count as free again."""


@dataclass(slots=True)
class Crowding:
    """Whether threads wait for cores, by what each reading says.

    Args:
        threads: of a team.
    """

    threads: int
    crowded: bool = False
    _calm: int = 0

    def update(self, waited: float) -> bool:
        """Args: waited: seconds per second, of all threads together."""
        free = FREE * self.threads
        if waited > free + CROWDED:
            self.crowded = True
        self._calm = self._calm + 1 if waited < free else 0
        if self._calm >= CALM:
            self.crowded = False
        return self.crowded


def watch_cores() -> None:
    """From now on idle workers sleep at once while other programs take the cores of this process,
    unless the environment says how they wait.

    Does nothing where PyTorch computes with one thread, or Linux or GNU OpenMP is missing.
    """
    if sys.modules["torch"].get_num_threads() > 1:
        start_watch()


@cache
def start_watch() -> None:
    said = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if not said and TASKS.exists() and (library := _library()) is not None:
        Thread(target=_watch, args=(library,), name="cores", daemon=True).start()


def _watch(library: ctypes.CDLL) -> None:
    crowding = Crowding(sys.modules["torch"].get_num_threads())
    reserve: _Reserve | None = None
    last = _Reading.now()
    while True:
        time.sleep(INTERVAL)
        now = _Reading.now()
        crowded = crowding.update(now.waited_since(last))
        last = now
        if crowded and reserve is None:
            with suppress(RuntimeError):  # not even one more thread can start
                reserve = _Reserve(library)
        elif not crowded and reserve is not None:
            reserve.end()
            reserve = None


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    waits: Mapping[str, int]
    """Nanoseconds that each thread was ready and had no core."""

    @classmethod
    def now(cls) -> _Reading:
        return cls(time.monotonic(), _waits())

    def waited_since(self, last: _Reading) -> float:
        """Seconds per second, of all threads together that were there before."""
        waited = sum(ns - last.waits.get(thread, ns) for thread, ns in self.waits.items())
        return waited / 1e9 / (self.at - last.at)


def _waits() -> dict[str, int]:
    waits: dict[str, int] = {}
    for thread in os.listdir(TASKS):
        with suppress(OSError, IndexError):  # it has ended; the kernel keeps no such statistics
            waits[thread] = int((TASKS / thread / "schedstat").read_bytes().split()[1])
    return waits


class _Reserve:
    """More OpenMP threads than there are cores, which do nothing; none where a limit on threads or
    memory leaves no room for them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._ended = Event()
        self._thread = Thread(target=self._keep, name="reserve", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        threads = len(os.sched_getaffinity(0)) + 1
        if _can_start(threads):  # libgomp ends the process if it cannot
            self._library.GOMP_parallel(_nothing, None, threads, 0)
        self._ended.wait()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()  # libgomp ends a thread's team with it


def _can_start(threads: int) -> bool:
    """Whether so many more threads can start, by starting and ending them."""
    end = Event()
    started: list[Thread] = []
    try:
        for _ in range(threads):
            thread = Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _nothing(_: object) -> None:
    """What threads of the reserve do."""


def end_team() -> None:
    """End the calling thread's idle OpenMP workers. Does nothing without PyTorch on GNU OpenMP."""
    if "torch" in sys.modules and (library := _library()) is not None:
        library.omp_pause_resource_all(SOFT)


async def to_thread(work: Callable[..., T], *args: Any) -> T:
    """``asyncio.to_thread`` for computations: the thread's OpenMP team ends with the work."""

    def run() -> T:
        try:
            return work(*args)
        finally:
            end_team()

    return await asyncio.to_thread(run)


@cache
def _library() -> ctypes.CDLL | None:
    """The libgomp of PyTorch's build; None if it has another OpenMP, or one without this call
    (before 5.0)."""
    file = sys.modules["torch"].__file__
    for path in sorted((Path(file or "").parent / "lib").glob("libgomp*")):
        library = ctypes.CDLL(str(path))  # the one that is already loaded
        return library if hasattr(library, "omp_pause_resource_all") else None
    return None
