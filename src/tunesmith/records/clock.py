"""Seconds by phase, which sum to the wall time. ``other`` is the time outside any phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Clock:
    """Divides wall time among phases. An inner phase's time does not count for the outer one.

    Phases belong to the thread that runs the loop. Work that overlaps another phase, such as
    rewards computed while other rollouts still generate, costs no extra wall time and is not a
    phase.

    Example:
        >>> clock = Clock()
        >>> with clock.phase("train"):
        ...     with clock.phase("checkpoint"):
        ...         save()
        >>> clock.lap()
        {'train': 1.2, 'checkpoint': 0.4, 'other': 0.01}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.totals: dict[str, float] = {}
        """Seconds by phase over all finished laps."""
        self._since = now()
        self._open: list[str] = []
        self._lap: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time spent inside as ``name``."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            ended = self._open.pop()
            assert ended == name, f"phase {name} ended inside phase {ended}"

    @property
    def current(self) -> str:
        """The innermost open phase."""
        return self._open[-1] if self._open else "other"

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap; their sum is the wall time since then."""
        self._charge()
        lap = self._lap
        self._lap = {}
        for name, seconds in lap.items():
            self.totals[name] = self.totals.get(name, 0.0) + seconds
        return lap

    def _charge(self) -> None:
        now = self.now()
        self._lap[self.current] = self._lap.get(self.current, 0.0) + now - self._since
        self._since = now
