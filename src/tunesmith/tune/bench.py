"""Compares settings of a run by real steps on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.monitor.interrupts import asked
from tunesmith.tune.arms import START_SECONDS, Arm, TrialEnded
from tunesmith.tune.intervals import MOST_PAIRS, interval
from tunesmith.tune.knobs import Values
from tunesmith.tune.search import Outcome

LEAST_PATIENCE, SLOW = 20.0, 4.0
"""A step is not waited for that takes longer than the first, in seconds, and so many times as long as the other's."""
BLOCK = 4
"""Steps in a row where only one run fits into memory at a time."""


@dataclass(slots=True)
class Bench:
    """Runs that are measured beside each other; the best one stays from one comparison to the next."""

    path: Path
    folder: Path
    ends: float
    """When the time is over (``time.monotonic``)."""
    config_of: Callable[[Values], RunConfig] = field(init=False)
    """The run with some settings."""
    fits: Callable[[Values], bool] = field(init=False)
    """Whether settings find enough memory while another run has what it needs."""
    concludes: bool = False
    """Whether what is measured now is waited for, although a signal has asked for the end."""
    together: bool = True
    """Whether two runs may be in memory at once."""
    _best: Arm | None = field(default=None, init=False)
    _best_values: Values | None = field(default=None, init=False)

    def hold(self, arm: Arm, values: Values) -> None:
        """Keep the run of the best settings."""
        if self._best is not arm:
            self.close()
        self._best, self._best_values = arm, values

    def compare(self, best: Values, values: Values, arm: Arm | None = None) -> Outcome:
        """What comes of other settings than the best ones so far.

        Args:
            arm: the run of the other settings, where there is one.

        Raises:
            TrialEnded: the best settings do not run any more.
        """
        try:
            return self._compare(best, values, arm)
        except TrialEnded:
            if not self.together:
                raise
            self.close()  # perhaps there was no memory for both
            self.together = False
            return self._compare(best, values, None)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends or (asked() and not self.concludes)

    def close(self) -> None:
        if self._best is not None:
            self._best.end()
        self._best = self._best_values = None

    def _compare(self, best: Values, values: Values, arm: Arm | None) -> Outcome:
        if self._best is None or self._best_values != best:
            self.hold(Arm(self.config_of(best), self.path, self.folder), best)
        known, other = self._best, arm or Arm(self.config_of(values), self.path, self.folder)
        assert known is not None, "it was just made"
        known.start()
        together = self.together and self.fits(values)
        found: list[float] = []
        outcome = Outcome("measured")
        try:
            for ratios in self._rounds(known, other, 1 if together else BLOCK):
                found += ratios
                if interval(found).decided or len(found) >= MOST_PAIRS or self.is_over:
                    break
            outcome = Outcome("measured", interval(found))
        except _OtherEnded as ended:
            outcome = Outcome(ended.status, interval(found) if found else None, ended.reason)
        finally:
            if outcome.status == "measured" and outcome.faster:
                self.hold(other, values)
            else:
                other.end()
        return outcome

    def _rounds(self, known: Arm, other: Arm, block: int) -> Iterator[list[float]]:
        """Log-ratios of the other run's times to the known one's; which goes first changes from round to round."""
        slowest, number = 0.0, 0
        while True:
            times: dict[bool, list[float]] = {}
            for is_known in (True, False) if number % 2 == 0 else (False, True):
                arm = known if is_known else other
                began, patience = time.monotonic(), START_SECONDS
                if not is_known and slowest:
                    patience = max(LEAST_PATIENCE, SLOW * slowest)
                times[is_known] = _steps(arm, block, patience, known=is_known)
                if is_known:
                    slowest = max(slowest, (time.monotonic() - began) / block)
                if block > 1:
                    arm.end()
            number += 1
            yield [log(b / a) for a, b in zip(times[True], times[False], strict=True)]


class _OtherEnded(Exception):
    def __init__(self, ended: TrialEnded) -> None:
        super().__init__()
        self.status: Any = ended.status
        self.reason = str(ended)


def _steps(arm: Arm, count: int, patience: float, *, known: bool) -> list[float]:
    try:
        arm.start()
        return [arm.step(patience) for _ in range(count)]
    except TrialEnded as ended:
        if known:
            raise
        raise _OtherEnded(ended) from ended
