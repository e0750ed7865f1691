"""Counts an engine's steps, and the least time they could have taken (``ForwardCost.seconds``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tunesmith.costs import ForwardCost, PeakRates
from tunesmith.run.engines.base import EngineStats
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
        counted = self.counted
        if batch.prefill is None:
            own = sum(r.cached for r in rows)
            shared = sum(len(p) for p in {r.prompt for r in rows} if p is not None)
            tokens = len(rows) + batch.drafted
            read = own + shared
            pairs = own + sum(len(r.prompt_ids) for r in rows)
            accepted = batch.sampled - len(rows)
            kind = {
                "decode_steps": counted.decode_steps + 1,
                "decode_seconds": counted.decode_seconds + seconds,
                "drafted_tokens": counted.drafted_tokens + batch.drafted,
                "accepted_tokens": counted.accepted_tokens + accepted,
            }
        else:
            tokens = sum(map(len, batch.prefill))
            read = 0
            pairs = sum(len(p) * (2 * p.positions[0] + len(p) + 1) // 2 for p in batch.prefill)
            kind = {
                "prefilled_tokens": counted.prefilled_tokens + tokens,
                "prefill_seconds": counted.prefill_seconds + seconds,
            }
        least = 0.0
        if self.limits and tokens:
            least = self.cost.seconds(self.limits, tokens, read, pairs)
        self.counted = replace(
            counted,
            **kind,
            sampled_tokens=counted.sampled_tokens + batch.sampled,
            peak_running=max(counted.peak_running, len(rows)),
            steps=counted.steps + 1,
            running_requests=counted.running_requests + running,
            waiting_requests=counted.waiting_requests + waiting,
            peak_kv_bytes=max(counted.peak_kv_bytes, kv_slots * self.cost.kv_bytes),
            attainable_seconds=counted.attainable_seconds + least,
        )
