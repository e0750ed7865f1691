"""Chooses the settings to measure next: a coordinate search that continues from the best settings
so far.

Pure: the functions that compare two settings and that predict their time are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunesmith.guide.tune.intervals import MOST_PAIRS, Interval
from tunesmith.guide.tune.knobs import Values, ordered

Status = Literal["measured", "late", "slow", "refused", "memory", "died", "hung", "failed"]
"""``late``: the time limit cut it short. ``slow``: it took several times as long and was abandoned.
The last five ended the trial."""
FAR = 1.5
"""Settings expected to take this many times as long as the best are not measured."""
CLEAR = 0.05
"""Log-ratio of times above which a setting counts as clearly slower, and values beyond it are not
tried."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial."""

    status: Status
    interval: Interval | None = None
    """Its times compared with those of the best settings before it."""
    reason: str = ""

    @property
    def faster(self) -> bool:
        return self.interval is not None and self.interval.high < 0

    @property
    def final(self) -> bool:
        """Whether the comparison was completed: neither the time limit nor a signal cut it
        short."""
        times = self.interval
        if self.status == "late":
            return False
        if self.status != "measured" or times is None:
            return self.status != "measured"
        return times.decided or times.pairs >= MOST_PAIRS

    @property
    def hopeful(self) -> bool:
        """Whether it took less time on average."""
        return self.interval is not None and self.interval.mean < 0

    @property
    def clearly_slower(self) -> bool:
        slower = self.interval is not None and self.interval.low > CLEAR
        return self.status not in ("measured", "late") or slower


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that differ from the best so far by a ``move``."""

    move: Values
    values: Values


def search(
    start: Values,
    candidates: Callable[[Values], Iterable[Candidate]],
    expected: Callable[[Values], float],
    compare: Callable[[Values, Candidate], TrialOutcome],
    time_is_left: Callable[[], bool],
) -> Values:
    """The fastest settings found: each candidate is compared with the best so far, the most
    promising first.

    A value that was not faster on average is not tried again with better settings, and no value
    beyond a clearly slower one is tried. Values that were faster on average, but not significantly,
    are tried together at the end.
    """
    best = start
    tried = [start]
    settled = list[Values]()
    refuted = list[Values]()
    hopeful: list[tuple[float, Values]] = []
    while time_is_left():
        left = [c for c in candidates(best) if c.move not in settled]
        left = [c for c in left if not any(_beyond(c.move, best, other) for other in refuted)]
        limit = FAR * expected(best)
        nearest = None
        for some in (left, _together(best, hopeful)):
            timed = [(expected(c.values), c) for c in some if c.values not in tried]
            near = [each for each in timed if each[0] <= limit]
            nearest = nearest or min(near, key=lambda each: each[0], default=None)
        if nearest is None:
            break
        candidate = nearest[1]
        outcome = compare(best, candidate)
        tried.append(candidate.values)
        if outcome.faster:
            best = candidate.values
            hopeful = []
        elif outcome.hopeful and outcome.interval:
            hopeful.append((outcome.interval.mean, candidate.move))
        else:
            settled.append(candidate.move)
            refuted += [candidate.move] if outcome.clearly_slower else []
    return best


def _together(best: Values, hopeful: Sequence[tuple[float, Values]]) -> Iterator[Candidate]:
    """All moves that were faster on average, at once; the best one if several change the same
    setting."""
    moves = [move for _, move in sorted(hopeful, key=lambda each: -each[0])]
    together = {key: value for move in moves for key, value in move.items()}
    if len(together) > 1:
        yield Candidate(together, {**best, **together})


def _beyond(move: Values, best: Values, other: Values) -> bool:
    """Whether a move leads in the same direction as another one, and further."""
    if len(move) != 1 or move.keys() != other.keys():
        return False
    key: Any = next(iter(move))
    here = ordered(best.get(key))
    there = ordered(move[key])
    between = ordered(other[key])
    if here is None or there is None or between is None:
        return False
    return here < between < there or here > between > there
