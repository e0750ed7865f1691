"""Compares settings of a run by measuring real steps on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, log
from pathlib import Path
from statistics import median

from tunesmith.config.schema import RunConfig
from tunesmith.guide.tune.arms import START_SECONDS, Arm, TrialEnded
from tunesmith.guide.tune.intervals import MOST_PAIRS, interval
from tunesmith.guide.tune.knobs import Values
from tunesmith.guide.tune.search import TrialOutcome
from tunesmith.records.interrupts import asked

LEAST_PATIENCE = 20.0
SLOW = 4.0
"""A step is abandoned after ``LEAST_PATIENCE`` seconds or ``SLOW`` times the other run's step,
whichever is longer."""
TURN = 1.0
MOST_STEPS = 5
"""A run with short steps takes several per turn: up to this many seconds and steps; their median
counts."""
BLOCK = 4
"""Consecutive steps of a run if only one run fits into memory at a time."""


@dataclass(slots=True)
class Bench:
    """Measures runs side by side; the best one stays from one comparison to the next."""

    path: Path
    folder: Path
    ends: float
    """When the time is up (``time.monotonic``)."""
    start_seconds: float = START_SECONDS
    """Time limit for the first step of each run."""
    config_of: Callable[[Values], RunConfig] = field(init=False)
    """Returns the run's configuration with given settings."""
    fits: Callable[[Values], bool] = field(init=False)
    """Whether a run with these settings fits into memory next to another run."""
    concludes: bool = False
    """Whether the current measurement is finished even after a signal to end."""
    _best: Arm | None = field(default=None, init=False)
    _best_values: Values | None = field(default=None, init=False)

    def hold(self, arm: Arm, values: Values) -> None:
        """Keep the run of the best settings."""
        if self._best is not arm:
            self.close()
        self._best = arm
        self._best_values = values

    def compare(self, best: Values, values: Values, arm: Arm | None = None) -> TrialOutcome:
        """Compare the settings ``values`` with the best ones so far.

        Args:
            arm: the run with these settings, if one exists.

        Raises:
            TrialEnded: the best settings no longer run.
        """
        if self._best is None or self._best_values != best:
            self.hold(self._arm(best), best)
        assert self._best is not None, "it was just made"
        other = arm or self._arm(values)
        outcome = TrialOutcome("measured")
        try:
            outcome = self._compared(
                self._best, other, lambda: arm is not None or self.fits(values)
            )
        finally:
            if outcome.status == "measured" and outcome.faster:
                self.hold(other, values)
            else:
                other.end()
        return outcome

    def _arm(self, values: Values) -> Arm:
        ends = inf if self.concludes else self.ends
        config = self.config_of(values)
        return Arm(config, self.path, self.folder, ends=ends, start_seconds=self.start_seconds)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends or (asked() and not self.concludes)

    def close(self) -> None:
        if self._best is not None:
            self._best.end()
        self._best = self._best_values = None

    def _compared(self, known: Arm, other: Arm, fits: Callable[[], bool]) -> TrialOutcome:
        """The comparison of two runs, both in memory if it has room for them; else one at a
        time."""
        try:
            known.start()
            if fits():
                outcome = self._in_turn(known, other, 1)
                if outcome.status != "memory":
                    return outcome
        except TrialEnded as ended:
            if ended.status == "late":
                return TrialOutcome("late", None, str(ended))
            # Perhaps memory was too small for both.
        known.end()
        other.end()
        return self._in_turn(known, other, BLOCK)

    def _in_turn(self, known: Arm, other: Arm, block: int) -> TrialOutcome:
        """The comparison of two runs that alternate every ``block`` steps; each round the other one
        goes first."""
        slowest = 0.0
        turn = 1
        ratios = list[float]()
        while not ratios or not (interval(ratios).decided or self.is_over):
            if len(ratios) >= MOST_PAIRS:
                break
            times: dict[bool, list[float]] = {}
            for arm in (known, other) if len(ratios) // block % 2 == 0 else (other, known):
                began = time.monotonic()
                patience = None
                if arm is other and slowest:
                    patience = max(LEAST_PATIENCE, SLOW * slowest)
                try:
                    arm.start()
                    taken = [arm.step(patience) for _ in range(max(block, turn))]
                    times[arm is known] = taken if block > 1 else [median(taken)]
                except TrialEnded as ended:
                    if arm is known and ended.status != "late":
                        raise
                    before = interval(ratios) if ratios else None
                    return TrialOutcome(ended.status, before, str(ended))
                if arm is known:
                    slowest = max(slowest, (time.monotonic() - began) / len(taken))
                    turn = max(1, min(MOST_STEPS, int(TURN / slowest))) if block == 1 else block
                if block > 1:
                    arm.end()
            ratios += [log(b / a) for a, b in zip(times[True], times[False], strict=True)]
        return TrialOutcome("measured", interval(ratios))
