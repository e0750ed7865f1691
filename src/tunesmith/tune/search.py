"""Which settings are measured next: a coordinate search that goes on from the best settings so far.

Pure: what comparing two settings gives, and how long each is expected to take, are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tunesmith.tune.intervals import MOST_PAIRS, Interval
from tunesmith.tune.knobs import Values, ordered

Status = Literal["measured", "slow", "refused", "memory", "died", "hung", "failed"]
"""``slow``: it took several times as long and was not waited for. The last five ended the trial."""
FAR = 1.5
"""Settings that are expected to take this many times as long as the best are not measured."""
CLEAR = 0.05
"""A log-ratio of times from which a setting is not measured again beside better ones."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial."""

    status: Status
    interval: Interval | None = None
    """Of its times beside those of the best settings before it."""
    reason: str = ""

    @property
    def faster(self) -> bool:
        return self.interval is not None and self.interval.high < 0

    @property
    def final(self) -> bool:
        """Whether the comparison came to its end: neither time nor a signal cut it short."""
        found = self.interval
        return self.status != "measured" or (found is not None and (found.decided or found.pairs >= MOST_PAIRS))

    @property
    def clearly_slower(self) -> bool:
        return self.status != "measured" or (self.interval is not None and self.interval.low > CLEAR)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that differ from the best so far by a ``move``."""

    move: Values
    values: Values


def search(
    start: Values,
    candidates: Callable[[Values], Iterable[Candidate]],
    expected: Callable[[Values], float],
    compare: Callable[[Values, Candidate], Outcome],
    time_is_left: Callable[[], bool],
) -> Values:
    """The fastest settings found: each candidate is compared with the best so far, the most promising first.

    A value that was clearly slower is not tried again, nor are values beyond it.
    """
    best, tried, refuted = start, [start], list[Values]()
    while time_is_left():
        limit = FAR * expected(best)
        left = [c for c in candidates(best) if c.values not in tried and not _refuted(c.move, best, refuted)]
        promising = [(seconds, c) for c in left if (seconds := expected(c.values)) <= limit]
        if not promising:
            break
        candidate = min(promising, key=lambda each: each[0])[1]
        outcome = compare(best, candidate)
        tried.append(candidate.values)
        if outcome.faster:
            best = candidate.values
        elif outcome.clearly_slower:
            refuted.append(candidate.move)
    return best


def _refuted(move: Values, best: Values, refuted: Iterable[Values]) -> bool:
    """Whether a move was clearly slower, or leads beyond one that was."""
    return any(move == other or _beyond(move, best, other) for other in refuted)


def _beyond(move: Values, best: Values, other: Values) -> bool:
    if len(move) != 1 or move.keys() != other.keys():
        return False
    key: Any = next(iter(move))
    here, there, between = ordered(best.get(key)), ordered(move[key]), ordered(other[key])
    if here is None or there is None or between is None:
        return False
    return here < between < there or here > between > there
