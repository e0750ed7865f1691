"""How busy other programs keep the cores that this process may use, as a metric."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

LEAST_SECONDS = 5.0
"""Time between two readings: finding a process's children takes some milliseconds."""
METRIC = "machine/others"


@dataclass(frozen=True, slots=True)
class CoreSeconds:
    """Seconds since unknown beginnings."""

    at: float
    busy: float
    """In which the cores were not idle, of all cores together."""
    own: float
    """In which this process and its descendants computed."""
    cores: int


class OtherPrograms:
    """The share of the cores that other programs keep busy, since the last reading."""

    def __init__(self) -> None:
        self._last = read()

    def metrics(self) -> dict[str, float]:
        """``machine/others``; empty if the last reading is not long ago."""
        if time.monotonic() - self._last.at < LEAST_SECONDS:
            return {}
        now = read()
        last = self._last
        self._last = now
        others = (now.busy - last.busy) - (now.own - last.own)
        share = others / (now.cores * (now.at - last.at))
        return {METRIC: min(1.0, max(0.0, share))}


def read() -> CoreSeconds:
    every = psutil.cpu_times(percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    ours = [every[core] for core in allowed if core < len(every)]
    return CoreSeconds(time.monotonic(), sum(map(_busy, ours)), _own(), len(ours))


def _busy(times: Any) -> float:
    """Time in virtual machines is part of ``user`` and ``nice``."""
    idle = times.idle + getattr(times, "iowait", 0.0)
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _own() -> float:
    process = psutil.Process()
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            times = each.cpu_times()
            seconds += times.user + times.system
            seconds += times.children_user + times.children_system
    return seconds
