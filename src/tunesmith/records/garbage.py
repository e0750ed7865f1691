"""Python's garbage collection while a command starts and ends.

What packages make while they are imported stays: a million objects with PyTorch and transformers.
Each full collection goes through all of them and finds nothing, which can take a third of the time
until the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

RARELY = (100_000, 10, 10)
"""Thresholds that a start reaches a few times, and never for a full collection."""
_usual: list[tuple[int, int, int]] = []
"""The thresholds to return to, while garbage is collected rarely."""


def collect_rarely() -> None:
    """Collect garbage rarely until ``collect_as_usual``."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(*RARELY)


def collect_as_usual() -> None:
    """Call this when packages are imported, and before models are made: collections leave out what
    exists now. Does nothing unless garbage is collected rarely."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())


@contextmanager
def of_a_run() -> Generator[None]:
    """For a run in a program that goes on after it: as in a command, and at the end collections go
    through everything again."""
    frozen = gc.get_freeze_count() > 0
    gc.collect()  # what is garbage already would stay while the run lasts
    collect_rarely()
    try:
        yield
    finally:
        collect_as_usual()
        if not frozen:
            gc.unfreeze()
