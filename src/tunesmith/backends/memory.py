"""Telling an out-of-memory failure from every other one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from tunesmith.errors import DeviceMemoryError

_CPU_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the untyped ones that the CPU allocator and oneDNN raise."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in words for phrase in _CPU_ALLOCATOR_WORDS)


@contextmanager
def memory_boundary(what: str) -> Generator[None]:
    """Raise ``DeviceMemoryError`` where ``what`` did not fit; let other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DeviceMemoryError) or not is_out_of_memory(error):
            raise
        # The chain is cut: its traceback would keep the failed forward's activations alive.
        raise DeviceMemoryError(f"{what} did not fit in memory") from None
