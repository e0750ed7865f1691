"""How much of a stretch of time was covered by spans that may overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""(start, stop)"""


def covered(intervals: Iterable[Interval], start: float, stop: float) -> float:
    """Seconds between ``start`` and ``stop`` that lie in at least one interval.

    Example:
        >>> covered([(0, 2), (1, 3), (5, 9)], 1, 6)
        3.0
    """
    total, end = 0.0, start
    for first, last in sorted(intervals):
        first, last = max(first, end), min(last, stop)
        if last > first:
            total, end = total + last - first, last
    return total


def mean_level(changes: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """The mean over time of a level that takes each change's value at its time, and keeps it until the next.

    Args:
        changes: (time, value), in the order of their times; the first one's value also holds before it.
    """
    area, since, value = 0.0, start, None
    for time, changed in changes:
        time = min(max(time, start), stop)
        area += (changed if value is None else value) * (time - since)
        since, value = time, changed
    assert value is not None, "a level has a value"
    return (area + value * (stop - since)) / (stop - start) if stop > start else value
