"""``metrics.jsonl`` as columns, and as curves with a bounded number of points."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunesmith.records.metrics import is_evaluation, numbers
from tunesmith.records.plain import JsonObject
from tunesmith.records.tail import Identity, ReadPosition, identity, json_object, open_lines

POINTS = 600
"""Maximum points of a curve; in a longer run a point covers several steps."""
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Table:
    """Lines as columns, ``[rows]`` each. Missing values are NaN."""

    columns: dict[str, array[float]] = field(default_factory=dict[str, "array[float]"])
    rows: int = 0

    def add(self, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * self.rows
            self.columns[name].append(value)
        self.rows += 1
        if len(line) < len(self.columns):
            for column in self.columns.values():
                if len(column) < self.rows:
                    column.append(math.nan)

    def column(self, name: str) -> Floats:
        values = self.columns.get(name)
        return np.full(self.rows, math.nan) if values is None else np.array(values)


@dataclass(slots=True)
class MetricsFile:
    """A run's metrics so far. ``read_on`` reads the lines that were added."""

    path: Path
    steps: Table = field(default_factory=Table)
    evaluations: Table = field(default_factory=Table)
    damaged: list[int] = field(default_factory=list[int])
    """Numbers of the lines that are not records."""
    lines: int = 0
    _file: Identity | None = None
    _place: ReadPosition = field(default_factory=ReadPosition)

    def read_on(self) -> bool:
        """Returns whether anything has changed. A replaced or truncated file is read from its
        beginning.

        Raises:
            StorageError: it cannot be read.
        """
        before = self._file, self._place.read
        with open_lines(self.path) as file:
            key = identity(file)
            if key != self._file or not self._place.is_in(file):
                self._file = key
                self._place = ReadPosition()
                self.steps = Table()
                self.evaluations = Table()
                self.damaged = []
                self.lines = 0
            for _, line in self._place.lines(file):
                self._add(line)
        return before != (self._file, self._place.read)

    def _add(self, line: bytes) -> None:
        self.lines += 1
        record = numbers(json_object(line) or {})
        if "step" not in record:
            self.damaged.append(self.lines)
        elif is_evaluation(record):
            self.evaluations.add(record)
        else:
            self.steps.add(record)


def curves(table: Table, most: int = POINTS) -> JsonObject:
    """``step``: the last step of each point; ``time``; and ``metrics``: ``mean``, ``low`` and
    ``high`` by name.

    Points without a number are null. If every point is one line, ``low`` and ``high`` are left out.
    """
    if not table.rows:
        return {"step": [], "time": [], "metrics": {}}
    points = min(table.rows, most)
    starts = np.linspace(0, table.rows, points, endpoint=False).astype(np.int64)
    stops = np.append(starts[1:], table.rows) - 1
    names = sorted(table.columns.keys() - {"step", "time"})
    curves = {name: _points(table.column(name), starts) for name in names}
    return {
        "step": [int(step) for step in table.column("step")[stops]],
        "time": shown(table.column("time")[stops], digits=13),
        "metrics": {name: c for name, c in curves.items() if set(c["mean"]) != {None}},
    }


def _points(values: Floats, starts: NDArray[np.int64]) -> dict[str, list[float | None]]:
    """Mean, minimum and maximum from each start to the next."""
    known = ~np.isnan(values)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), math.nan), where=counts > 0)
    if len(starts) == len(values):
        return {"mean": shown(means)}
    lows = np.fmin.reduceat(values, starts)
    highs = np.fmax.reduceat(values, starts)
    return {"mean": shown(means), "low": shown(lows), "high": shown(highs)}


def shown(values: Floats | Sequence[float], digits: int = 6) -> list[float | None]:
    """Numbers rounded to ``digits`` significant digits; null for NaN."""
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in values]


def totals(table: Table, prefix: str) -> dict[str, float]:
    """The sums of all columns with a prefix, by the rest of their names, largest first."""
    names = [name for name in table.columns if name.startswith(prefix)]
    sums = {name.removeprefix(prefix): float(np.nansum(table.column(name))) for name in names}
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))
