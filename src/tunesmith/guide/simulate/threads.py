"""The GPUs of a run's simulated processes, each of which is some threads of this one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import Thread, current_thread

FIRST = "trainer"
"""The name of the GPU of threads that were not assigned one."""
_GPU = "_fake_gpu"


def gpu_of_thread() -> str:
    return vars(current_thread()).get(_GPU, FIRST)


def starts_here(thread: Thread) -> None:
    """Let a thread that this one is about to start use the same GPU."""
    vars(thread)[_GPU] = gpu_of_thread()


@contextmanager
def on_gpu(name: str) -> Generator[None]:
    """Inside, this thread and the threads that it starts use the GPU ``name``."""
    before = gpu_of_thread()
    vars(current_thread())[_GPU] = name
    try:
        yield
    finally:
        vars(current_thread())[_GPU] = before
