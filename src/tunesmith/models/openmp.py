"""Idle OpenMP workers: GNU OpenMP gives each thread that computes a team, which spins while it has
nothing to do.

By default a worker spins for some milliseconds before it sleeps. While other programs use the
cores, it takes the time of those it waits for: training with two threads on two busy cores then
takes many times as long as with one.

While a process has more OpenMP threads than there are cores, libgomp no longer spins at the end of
a parallel region but sleeps, and a small operation takes two to four times as long. So a thread
that hands over to another ends its team; a new one is made in about 0.1 ms when the thread computes
again.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SOFT = 1
"""``omp_pause_soft``: keep the settings, such as the number of threads."""


SPINS = 1000
"""Some 50 µs: longer than the pauses between the operations of a step, shorter than a scheduler's
time slice."""


def spin_briefly() -> None:
    """Let workers sleep soon, in this process and its children, unless the environment says how
    they wait.

    GNU OpenMP reads it when it is loaded: call this before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


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
def _library() -> Any:
    """The libgomp of PyTorch's build; None if it has another OpenMP, or one without this call
    (before 5.0)."""
    file = sys.modules["torch"].__file__
    for path in sorted((Path(file or "").parent / "lib").glob("libgomp*")):
        library = ctypes.CDLL(str(path))  # the one that is already loaded
        return library if hasattr(library, "omp_pause_resource_all") else None
    return None
