"""Distinguishes out-of-memory failures from all others; keeps memory that a step will need
again."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Generator
from contextlib import contextmanager

from tunesmith.errors import DeviceMemoryError, is_out_of_memory

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3  # from malloc.h
_LARGE = 32 << 20


def keep_freed_memory() -> None:
    """Keep freed host memory in this process, in blocks of up to 32 MB, if the C library is glibc.

    Otherwise it goes back to the system whenever the end of the heap is free. A step allocates such
    blocks all the time, and the first touch of a page costs several times as much as writing it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def memory_boundary(what: str) -> Generator[None]:
    """Raise ``DeviceMemoryError`` if ``what`` did not fit; let other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, DeviceMemoryError) or not is_out_of_memory(error):
            raise
        # The chain is cut: its traceback would keep the failed forward's activations alive.
        raise DeviceMemoryError(f"{what} did not fit in memory") from None
