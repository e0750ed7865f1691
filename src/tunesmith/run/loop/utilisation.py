"""What each of several engines did in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from tunesmith.records.timeline import by_member
from tunesmith.run.engines.base import EngineStats, Member, RunningEngine
from tunesmith.run.trainers.base import Metrics


class Utilisation:
    """Measures engines from step to step.

    Args:
        running: the engines that are running; None: a single one is in the trainer's process, and
            has no figures besides the run's (``groups.engine_metrics``).
    """

    def __init__(self, running: Callable[[], Sequence[RunningEngine]] | None) -> None:
        self._running = running
        self._before: dict[Member, EngineStats] = {}
        """The counters up to the last step."""

    def metrics(self, version: int) -> Metrics:
        """The figures of each engine since the last call, and how many there are.

        Args:
            version: of the policy that the step trained.
        """
        if self._running is None:
            return {}
        seats = self._running()
        metrics: Metrics = {"engines": float(len(seats))}
        stats = {seat.member: seat.member.stats() for seat in seats}
        figures = defaultdict[str, dict[int, float]](dict)
        for seat in seats:
            now = stats[seat.member]
            new = now.since(self._before.get(seat.member, EngineStats()))
            if new.steps:
                figures["engine_running"][seat.number] = new.running_requests / new.steps
                figures["engine_waiting"][seat.number] = new.waiting_requests / new.steps
            if now.kv_budget_bytes:
                figures["kv_used"][seat.number] = now.peak_kv_bytes / now.kv_budget_bytes
            if seat.publication:
                figures["weight_age"][seat.number] = float(version - seat.version)
        self._before = stats
        if "weight_age" in figures:
            metrics["weight_age"] = fmean(figures["weight_age"].values())
        for name, values in figures.items() if len(seats) > 1 else ():
            metrics |= by_member(name, values)
        return metrics
