"""The GPUs of a run's processes, where each process is some threads of this one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import Thread, current_thread

FIRST = "trainer"
"""The name of the GPU of threads that were given none."""
_GPU = "_fake_gpu"


def gpu_of_thread() -> str:
    return vars(current_thread()).get(_GPU, FIRST)


def starts_here(thread: Thread) -> None:
    """A thread that this one is about to start will use the same GPU."""
    vars(thread)[_GPU] = gpu_of_thread()


@contextmanager
def on_gpu(name: str) -> Generator[None]:
    """Inside, this thread uses the GPU of a name, and so do threads that it starts."""
    before = gpu_of_thread()
    vars(current_thread())[_GPU] = name
    try:
        yield
    finally:
        vars(current_thread())[_GPU] = before
