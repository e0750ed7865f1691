"""Metrics as columns, and their statistics. What is unknown is NaN, so that no condition on it
holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from tunesmith.records.facts import Metrics

LEAST_WINDOW = 3
SHARE = 5
"""The first and the last ``1 / SHARE`` of the steps are compared."""
BEFORE = 10
"""Number of preceding steps that a jump is compared with."""


class Figure(float):
    """A number that shows as three digits unless told otherwise, and as ``?`` if it is unknown
    (NaN)."""

    def __format__(self, spec: str) -> str:
        return "?" if math.isnan(self) else format(float(self), spec or ".3g")


UNKNOWN = Figure("nan")


def ratio(part: float, whole: float) -> Figure:
    return Figure(part / whole) if whole else UNKNOWN


def mean(values: Sequence[float]) -> Figure:
    """The mean; NaN for infinities of both signs, which ``fmean`` refuses."""
    return Figure(sum(values) / len(values)) if values else UNKNOWN


def window(count: int) -> int:
    """The number of steps at either end that are compared."""
    return min(count, max(LEAST_WINDOW, math.ceil(count / SHARE)))


def span(lines: Sequence[Metrics]) -> str:
    """The steps of the lines, from-to."""
    return f"{lines[0]['step']:.0f}-{lines[-1]['step']:.0f}" if lines else "0-0"


@dataclass(frozen=True, slots=True)
class Jump:
    """The ratio of a value to the median of the ``BEFORE`` preceding ones, which a run's first
    steps lack."""

    times: float = UNKNOWN
    step: float = UNKNOWN
    usual: Figure = UNKNOWN
    value: Figure = UNKNOWN


@dataclass(frozen=True)
class Column:
    """A metric's values with their steps; ``first`` and ``last`` are means over ``width``
    values."""

    pairs: Sequence[tuple[float, float]] = ()
    width: int = 1

    @cached_property
    def values(self) -> list[float]:
        return [value for value, _ in self.pairs]

    @property
    def count(self) -> int:
        return len(self.pairs)

    @property
    def first(self) -> Figure:
        return mean(self.values[: self.width])

    @property
    def last(self) -> Figure:
        return mean(self.values[-self.width :])

    @property
    def rise(self) -> Figure:
        return Figure(self.last - self.first)

    @property
    def times(self) -> Figure:
        """``last`` / ``first``."""
        return Figure(self.last / self.first) if self.first > 0 else UNKNOWN

    @property
    def sum(self) -> Figure:
        return Figure(sum(self.values)) if self.values else UNKNOWN

    @property
    def mean(self) -> Figure:
        return mean(self.values)

    @cached_property
    def median(self) -> Figure:
        return Figure(median(self.values)) if self.values else UNKNOWN

    @property
    def min(self) -> Figure:
        return Figure(min(self.values, default=UNKNOWN))

    @property
    def max(self) -> Figure:
        return Figure(max(self.values, default=UNKNOWN))

    @property
    def min_step(self) -> float:
        return min(self.pairs, default=(UNKNOWN, UNKNOWN))[1]

    @property
    def max_step(self) -> float:
        return max(self.pairs, default=(UNKNOWN, UNKNOWN))[1]

    @property
    def jump(self) -> Jump:
        """The largest one."""
        return max(self.jumps, key=lambda jump: jump.times, default=Jump())

    @cached_property
    def jumps(self) -> list[Jump]:
        pairs = [(value, step) for value, step in self.pairs if value > 0]
        jumps: list[Jump] = []
        for index in range(BEFORE, len(pairs)):
            usual = median(value for value, _ in pairs[index - BEFORE : index])
            value, step = pairs[index]
            jumps.append(Jump(value / usual, step, Figure(usual), Figure(value)))
        return jumps


class Columns:
    """The metrics in lines of ``metrics.jsonl``, by name.

    Args:
        tables: lines, with the width of ``first`` and ``last`` (None: a fifth). The first that has
            a metric counts.
    """

    def __init__(self, *tables: tuple[Sequence[Metrics], int | None]) -> None:
        self._tables = tables
        self._columns: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            self._columns[name] = Column()
            for lines, width in reversed(self._tables):
                pairs = [(line[name], line["step"]) for line in lines if name in line]
                if pairs:
                    self._columns[name] = Column(pairs, width or window(len(pairs)))
        return self._columns[name]

    def names(self, pattern: str) -> list[str]:
        """The part in parentheses of each metric's name that fits the pattern, in the order of the
        lines."""
        names = dict.fromkeys(name for lines, _ in self._tables for line in lines for name in line)
        return [match[1] for match in (re.fullmatch(pattern, name) for name in names) if match]
