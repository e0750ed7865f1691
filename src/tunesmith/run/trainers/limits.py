"""The rates that a device attains, measured with torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import torch

from tunesmith.costs import PeakRates
from tunesmith.errors import DeviceMemoryError
from tunesmith.models.kernels.functions import which
from tunesmith.plan.facts.hardware import memory

DType = Literal["float32", "bfloat16", "float16"]


@cache
def measure_limits(device: str, dtype: DType) -> PeakRates:
    """Measure matrix products and a copy on ``device``, once per process, in a few tenths of a
    second.

    The best of several runs counts, because a limit is what no run exceeds.
    """
    kind = getattr(torch, dtype)
    on_gpu = torch.device(device).type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    with torch.no_grad():
        if not on_gpu and _is_slow(kind):
            kind = torch.float32  # in which such products are computed there
        size = 8192 if on_gpu else 1024
        a = torch.ones(size, size, dtype=kind, device=device)
        product = torch.empty_like(a)
        ways = [lambda: torch.mm(a, a, out=product)]
        functions = which(lambda functions: functions.multiplies_rows(a, a))
        if functions is not None:
            ways.append(partial(functions.product, a, a, turned=True))
        flops = 2 * size**3 / min(_best_seconds(way, wait) for way in ways)
        # On a CPU more than its cache holds, but a small part of the free memory.
        copied = 512 * 2**20 if on_gpu else max(2**20, min(64 * 2**20, memory()[1] // 256))
        bandwidth = copy_rate(copied, device, wait)
    if on_gpu:
        del a, product
        torch.cuda.empty_cache()  # other processes may use the device
    return PeakRates(flops, bandwidth)


def _is_slow(kind: torch.dtype) -> bool:
    """Whether products of 1024 rows would take seconds: many CPUs multiply 16 bits up to a hundred
    times as slowly as float32."""
    a = torch.ones(256, 256, dtype=kind)
    return min(_seconds(lambda: torch.mm(a, a)) for _ in range(2)) > 0.005


def copy_rate(size: int, device: str, wait: Callable[[], None]) -> float:
    """Bytes read and written per second when copying ``size`` bytes, or half as many if memory is
    short."""
    try:
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
    except RuntimeError:  # the only error torch raises when memory is short
        if size <= 2**16:
            raise DeviceMemoryError(
                f"there is no memory left on {device}: not even for {2 * size} bytes"
            ) from None
        return copy_rate(size // 2, device, wait)
    return 2 * size / _best_seconds(lambda: target.copy_(source), wait)


def _best_seconds(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """The fastest of at least three runs, repeated for about 0.15 seconds after a warm-up run."""
    run()
    wait()
    best = float("inf")
    started = time.perf_counter()
    tries = 0
    while tries < 3 or time.perf_counter() - started < 0.15:
        best = min(best, _seconds(lambda: (run(), wait())))
        tries += 1
    return best


def _seconds(run: Callable[[], object]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before
