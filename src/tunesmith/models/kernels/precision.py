"""The precision of float32 products on a CPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch


class _Precision:
    """The precision of float32 products, a process-wide setting: threads share it, and the last one
    restores it."""

    lock = Lock()
    users = 0
    precision = ""

    @classmethod
    def add(cls, users: int) -> None:
        settings = cast(Any, torch.backends.mkldnn).matmul
        with cls.lock:
            if not cls.users:
                cls.precision = settings.fp32_precision
            cls.users += users
            settings.fp32_precision = "bf16" if cls.users else cls.precision


def rounds_operands() -> bool:
    """Whether float32 products round their operands now."""
    return bool(_Precision.users)


@contextmanager
def bfloat16_operands(wanted: bool) -> Generator[None]:
    """Make float32 products on a CPU round their operands to bfloat16, which is exact if both hold
    bfloat16 values.

    A bfloat16 product would also round its result; this is as fast and does not. Gradients of the
    logits are rounded to bfloat16, as in any bfloat16 backward pass. Meanwhile, float32 products of
    other threads are rounded too.
    """
    _Precision.add(int(wanted))
    try:
        yield
    finally:
        _Precision.add(-int(wanted))
