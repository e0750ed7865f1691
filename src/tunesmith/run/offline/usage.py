"""Resources that the parts of a command use: seconds by phase, peak memory, and KV cache memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from tunesmith.errors import StorageError
from tunesmith.records.clock import Clock
from tunesmith.records.memory import memory_metrics
from tunesmith.records.plain import JsonObject
from tunesmith.records.storage import read_json
from tunesmith.run.engines.base import EngineStats

COMMON = "setup"
"""The part for time outside any phase, and its only phase: reading settings, data and rewards."""
_SECONDS = "seconds/"


class Usage:
    """Metrics by part of the command: ``{"round-1": {"seconds/sampling": 4.2, "kv_peak": 1e6}}``.

    Seconds add up; memory is the maximum.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._clock = Clock(now)
        self._parts: dict[str, dict[str, float]] = {COMMON: {}}
        self.earlier = 0.0
        """Seconds of earlier calls of the same run."""

    def add_earlier(self, parts: Mapping[str, Mapping[str, float]]) -> None:
        """Add the result that ``parts`` had at the end of an earlier call."""
        for part, metrics in parts.items():
            self.add(part, metrics)
            self.earlier += sum(seconds_of(metrics).values())

    @contextmanager
    def phase(self, name: str, part: str | None = None) -> Generator[None]:
        """Count time spent inside towards a phase of ``part``; None is the part of the enclosing
        phase."""
        part = part or self._current
        with self._clock.phase(f"{part}/{name}"):
            try:
                yield
            finally:
                self.add(part, memory_metrics())

    def add(self, part: str, metrics: Mapping[str, float]) -> None:
        self._parts[part] = total_of([self._parts.get(part, {}), metrics])

    def add_engine(self, stats: EngineStats) -> EngineStats:
        """Add KV memory to the part whose phase is open; returns ``stats``."""
        if stats.peak_kv_bytes:
            self.add(self._current, {"kv_peak": float(stats.peak_kv_bytes)})
        if stats.kv_budget_bytes:
            self.add(self._current, {"kv_used": stats.peak_kv_bytes / stats.kv_budget_bytes})
        return stats

    def parts(self) -> dict[str, dict[str, float]]:
        """The metrics so far, by part, rounded to the millisecond."""
        for place, seconds in self._clock.lap().items():
            part, _, name = place.partition("/")
            part, name = (part, name) if name else (COMMON, COMMON)
            self.add(part, {_SECONDS + name: seconds})
        return {
            part: {name: round(value, 3) for name, value in metrics.items()}
            for part, metrics in self._parts.items()
        }

    @property
    def _current(self) -> str:
        part, _, phase = self._clock.current.partition("/")
        return part if phase else COMMON


def total_of(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of seconds and the maximum of memory over all parts."""
    total: dict[str, float] = {}
    for name, value in (entry for metrics in parts for entry in metrics.items()):
        before = total.get(name, 0.0)
        total[name] = round(before + value, 6) if name.startswith(_SECONDS) else max(before, value)
    return total


def seconds_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase."""
    seconds = {name: value for name, value in metrics.items() if name.startswith(_SECONDS)}
    return {name.removeprefix(_SECONDS): value for name, value in seconds.items()}


def read_report(path: Path) -> JsonObject:
    """What an earlier call summed up.

    Raises:
        StorageError: it is damaged; says that the run does not need it.
    """
    try:
        return read_json(path)
    except StorageError as error:
        raise StorageError(f"{error}. Delete it: answers and models are kept elsewhere") from error
