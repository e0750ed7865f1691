"""Counts an engine's steps, and the least time they could have taken (``ForwardCost.seconds``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tunesmith.costs import ForwardCost, PeakRates
from tunesmith.run.engines.base import EngineStats, add_stats
from tunesmith.run.engines.local.requests import StepBatch


@dataclass(slots=True)
class Meter:
    """Counters of an engine's steps."""

    cost: ForwardCost
    limits: PeakRates | None
    counted: EngineStats = field(default_factory=EngineStats)

    def count(
        self, batch: StepBatch, kv_slots: int, seconds: float, running: int, waiting: int
    ) -> None:
        """Count a step whose tokens were appended, before any request is released.

        Args:
            kv_slots: slots of the KV memory in use.
            running: requests that have a place, also those that a prefill keeps waiting.
            waiting: requests that have none.
        """
        rows = batch.requests
        if batch.prefill is None:
            own = sum(r.cached for r in rows)
            shared = sum(len(p) for p in {r.prompt for r in rows} if p is not None)
            tokens = len(rows) + batch.drafted
            read = own + shared
            pairs = own + sum(len(r.prompt_ids) for r in rows)
            step = EngineStats(
                decode_steps=1,
                decode_seconds=seconds,
                drafted_tokens=batch.drafted,
                accepted_tokens=batch.sampled - len(rows),
            )
        else:
            tokens = sum(map(len, batch.prefill))
            read = 0
            pairs = sum(len(p) * (2 * p.positions[0] + len(p) + 1) // 2 for p in batch.prefill)
            step = EngineStats(prefilled_tokens=tokens, prefill_seconds=seconds)
        limits = self.limits if tokens else None
        step = replace(
            step,
            sampled_tokens=batch.sampled,
            peak_running=len(rows),
            steps=1,
            running_requests=running,
            waiting_requests=waiting,
            peak_kv_bytes=kv_slots * self.cost.kv_bytes,
            attainable_seconds=self.cost.seconds(limits, tokens, read, pairs) if limits else 0.0,
        )
        self.counted = add_stats(self.counted, step)
