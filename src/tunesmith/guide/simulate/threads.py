"""The GPUs of a run's simulated processes, each of which is some threads of this one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread, current_thread

FIRST = "trainer"
"""The name of the GPU, and of the process, of threads that were not assigned one."""
_OCCUPANT = "_fake_occupant"


@dataclass(frozen=True, slots=True)
class Occupant:
    """A simulated process and the GPU that it uses, by name."""

    gpu: str = FIRST
    process: str = FIRST


def occupant_of_thread() -> Occupant:
    return vars(current_thread()).get(_OCCUPANT, Occupant())


def starts_here(thread: Thread) -> None:
    """Let a thread that this one is about to start belong to the same process."""
    vars(thread)[_OCCUPANT] = occupant_of_thread()


@contextmanager
def inside(occupant: Occupant) -> Generator[None]:
    """Inside, this thread and the threads that it starts belong to another process."""
    before = occupant_of_thread()
    vars(current_thread())[_OCCUPANT] = occupant
    try:
        yield
    finally:
        vars(current_thread())[_OCCUPANT] = before
