"""Records all activities with actor and time, for idle shares, traces and the watchdog."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.records.plain import JsonObject
from tunesmith.records.trace import FinishedStep, Span, write_trace

Interval = tuple[float, float]
"""(start, stop)"""

LOOP = "loop"
TRAINER = "trainer"
REWARD = "reward"
ROLLOUTS = "rollouts"
OUTSIDE_STEPS = ("setup", "eval", "checkpoint")
"""Phases of the lane ``loop`` whose time does not count in a step's rates and idle shares."""
TRAINER_WAITS = {"rollout": "the rollouts", "sync": "the engines to take the weights"}
"""Phases in which the trainer waits, and what it waits for."""


def engine_lane(number: int) -> str:
    return f"engine {number}"


def rank_lane(number: int) -> str:
    return f"rank {number}"


def by_member(name: str, values: Mapping[int, float]) -> dict[str, float]:
    """The least and the greatest of several members' values, and each of them.

    Example:
        >>> by_member("rank_busy", {0: 0.5, 2: 0.25})
        {'rank_busy/min': 0.25, 'rank_busy/max': 0.5, 'rank_busy/0': 0.5, 'rank_busy/2': 0.25}
    """
    if not values:
        return {}
    ends = {f"{name}/min": min(values.values()), f"{name}/max": max(values.values())}
    return ends | {f"{name}/{number}": value for number, value in values.items()}


class Timeline:
    """Records spans and levels of the current step. All methods may be called from any thread.

    A lane is idle while it has no open span of work. Idle shares are reported for the trainer and
    for every engine that takes part. Time in ``OUTSIDE_STEPS`` does not count.

    Args:
        directory: where traces are written; created with the first one.
        steps: the steps whose traces are written.

    Example:
        >>> with timeline.span("engine 0", "generate", prompt=12) as details:
        ...     details["tokens"] = 40
        >>> timeline.finish_step(1)
        {'idle/trainer': 1.0}
    """

    def __init__(
        self,
        directory: Path | None = None,
        steps: Collection[int] = (),
        *,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._directory = directory
        self._steps = frozenset(steps)
        self.now = now
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._levels: dict[str, list[tuple[float, float]]] = {}
        self._engines: set[str] = set()
        self._since = now()
        self.moved = self._since
        """When a span last began or ended, or a level changed."""

    @contextmanager
    def span(
        self, lane: str, name: str, *, waits_for: str | None = None, **details: Any
    ) -> Generator[JsonObject]:
        """Record the time inside, also around awaits. Yields ``details``, which can be extended
        until the span ends.

        In an engine's span, they include the number of sampled ``tokens``.
        """
        span = Span(lane, name, self.now(), None, waits_for, details)
        self._record(span)
        try:
            yield details
        finally:
            span.stop = self.moved = self.now()

    def add(self, lane: str, name: str, start: float, stop: float, **details: Any) -> None:
        """A span measured elsewhere, by this timeline's clock (``now``)."""
        self._record(Span(lane, name, start, stop, None, details))

    def level(self, name: str, value: float) -> None:
        """Set a quantity that always has a value, such as the length of a queue.

        A step's metrics report its mean over time and its maximum.
        """
        with self._lock:
            self._levels.setdefault(name, []).append((self.now(), value))
        self.progress()

    def progress(self) -> None:
        """Report progress that is neither a span nor a level to the watchdog."""
        self.moved = self.now()

    def enter(self, engine: str) -> None:
        """An engine takes part: from now on its idle time counts."""
        with self._lock:
            self._engines.add(engine)

    def leave(self, engine: str) -> None:
        with self._lock:
            self._engines.discard(engine)

    def open_spans(self) -> list[Span]:
        """Oldest first."""
        with self._lock:
            return [span for span in self._spans if span.stop is None]

    def finish_step(self, number: int) -> dict[str, float]:
        """The metrics of the time since the last call. Writes the step's trace if it is one of
        ``steps``.

        Returns:
            ``idle/trainer``, ``idle/engine`` (the mean of all; also ``by_member`` if there are
            several), ``engine_tokens_per_second`` (likewise; per second with at least one request),
            ``rank_busy`` and ``rank_waiting`` (likewise) of ranks that have spans,
            ``waiting/reward`` and ``waiting/environment`` if these were active, and ``.../mean``
            and ``.../max`` of every level.

        Raises:
            StorageError: the trace cannot be written.
        """
        step, engines = self._cut(number)
        if number in self._steps and self._directory is not None:
            write_trace(step, self._directory)
        return activity_metrics(step, sorted(engines))

    def _record(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)
        self.progress()

    def _cut(self, number: int) -> tuple[FinishedStep, set[str]]:
        with self._lock:
            start = self._since
            stop = self.now()
            # A span that ends while this runs counts as open in this step, and continues in the
            # next.
            spans = [(span, span.stop) for span in self._spans]
            cut: list[Span] = []
            for span, end in spans:
                until = stop if end is None else max(start, min(end, stop))
                begun = max(span.start, start)
                cut.append(replace(span, start=begun, stop=until, details=dict(span.details)))
            levels = {name: list(changes) for name, changes in self._levels.items()}
            step = FinishedStep(number, start, stop, tuple(cut), levels)
            self._spans = [span for span, end in spans if end is None]
            self._levels = {name: [(stop, each[-1][1])] for name, each in levels.items()}
            self._since = stop
            return step, set(self._engines)


def activity_metrics(step: FinishedStep, engines: Sequence[str]) -> dict[str, float]:
    """See ``Timeline.finish_step``."""
    excluded = [_ends(s) for s in step.spans if s.lane == LOOP and s.name in OUTSIDE_STEPS]
    left_out = covered(excluded, step.start, step.stop)
    seconds = step.stop - step.start - left_out

    def busy(lane: str) -> float:
        """Seconds of work within the step."""
        work = [_ends(s) for s in step.spans if s.lane == lane and s.waits_for is None]
        return covered([*work, *excluded], step.start, step.stop) - left_out

    metrics: dict[str, float] = {}
    for name, changes in step.levels.items():
        metrics[f"{name}/mean"] = mean_level(changes, step.start, step.stop)
        metrics[f"{name}/max"] = max(value for _, value in changes)
    if seconds <= 0:
        return metrics
    metrics["idle/trainer"] = 1 - busy(TRAINER) / seconds
    worked = {lane: busy(lane) for lane in engines}
    tokens = dict.fromkeys(engines, 0.0)
    for span in step.spans:
        if span.lane in tokens:
            tokens[span.lane] += _tokens(span, excluded)
    total = sum(worked.values())
    if engines:
        metrics["idle/engine"] = 1 - total / (seconds * len(engines))
    if total:
        metrics["engine_tokens_per_second"] = sum(tokens.values()) / total
    if len(engines) > 1:
        idle = {_number(lane): 1 - worked[lane] / seconds for lane in engines}
        rates = {_number(lane): tokens[lane] / worked[lane] for lane in engines if worked[lane]}
        metrics |= by_member("idle/engine", idle) | by_member("engine_tokens_per_second", rates)
    metrics |= _ranks(step, excluded, seconds)
    return metrics | _waiting(step, [TRAINER, *engines], excluded, seconds)


def _number(lane: str) -> int:
    return int(lane.rpartition(" ")[2])


def _ranks(step: FinishedStep, excluded: Sequence[Interval], seconds: float) -> dict[str, float]:
    """Shares of the time in which each rank of the trainer computed, and in which others did and it
    did not."""
    work: dict[int, list[Interval]] = {}
    for span in step.spans:
        if span.lane.startswith("rank "):
            work.setdefault(_number(span.lane), []).append(_ends(span))
    if not work:
        return {}

    def share(spans: Iterable[Interval]) -> float:
        outside = covered(excluded, step.start, step.stop)
        return (covered([*spans, *excluded], step.start, step.stop) - outside) / seconds

    together = share(span for spans in work.values() for span in spans)
    busy = {number: share(work[number]) for number in sorted(work)}
    waiting = {number: together - own for number, own in busy.items()}
    metrics: dict[str, float] = {}
    for name, values in (("rank_busy", busy), ("rank_waiting", waiting)):
        metrics[name] = sum(values.values()) / len(values)
        metrics |= by_member(name, values)
    return metrics


def _waiting(
    step: FinishedStep, lanes: Sequence[str], excluded: Sequence[Interval], seconds: float
) -> dict[str, float]:
    """Shares of the time in which all ``lanes`` are idle: waiting for rewards and, otherwise, for
    episodes."""
    done = [*excluded, *(_ends(s) for s in step.spans if s.lane in lanes and s.waits_for is None)]
    waiting: dict[str, float] = {}
    for name, lane in ((REWARD, REWARD), ("environment", ROLLOUTS)):
        own = [_ends(s) for s in step.spans if s.lane == lane]
        if own:
            before = covered(done, step.start, step.stop)
            done += own
            waiting[f"waiting/{name}"] = (covered(done, step.start, step.stop) - before) / seconds
    return waiting


def _ends(span: Span) -> Interval:
    assert span.stop is not None, "a span of a finished step is cut at its end"
    return span.start, span.stop


def _tokens(span: Span, excluded: Sequence[Interval]) -> float:
    """Tokens that an engine sampled in the step; a request that overlaps excluded time counts in
    proportion."""
    start, stop = _ends(span)
    share = 1 - covered(excluded, start, stop) / (stop - start) if stop > start else 1.0
    return share * span.details.get("tokens", 0)


def covered(intervals: Iterable[Interval], start: float, stop: float) -> float:
    """Seconds between ``start`` and ``stop`` that lie in at least one interval.

    Example:
        >>> covered([(0, 2), (1, 3), (5, 9)], 1, 6)
        3.0
    """
    total = 0.0
    end = start
    for first, last in sorted(intervals):
        first = max(first, end)
        last = min(last, stop)
        if last > first:
            total = total + last - first
            end = last
    return total


def mean_level(changes: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """The mean over time of a level that keeps each value until the next change.

    Args:
        changes: (time, value), in order of time; the first value also applies before its time.
    """
    area = 0.0
    since = start
    value = None
    for moment, changed in changes:
        moment = min(max(moment, start), stop)
        area += (changed if value is None else value) * (moment - since)
        since = moment
        value = changed
    assert value is not None, "a level has a value"
    return (area + value * (stop - since)) / (stop - start) if stop > start else value
