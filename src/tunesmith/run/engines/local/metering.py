"""Counts an engine's steps, and the least time they could have taken (``ForwardCost.seconds``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunesmith.costs import ForwardCost, PeakRates
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.local.requests import StepBatch


@dataclass(slots=True)
class Meter:
    """Counters of an engine's steps, which change in place: they are counted at each step."""

    cost: ForwardCost
    limits: PeakRates | None
    counted: EngineStats = field(default_factory=EngineStats)

    def count(
        self, batch: StepBatch, kv_slots: int, seconds: float, running: int, waiting: int
    ) -> None:
        """Count a step, or several decode steps, whose tokens were appended, before any request is
        released.

        Args:
            kv_slots: slots of the KV memory in use.
            running: requests that have a place, also those that a prefill keeps waiting.
            waiting: requests that have none.
        """
        rows = batch.requests
        counted = self.counted
        if batch.prefill is None:
            own = sum([r.cached for r in rows])
            shared = sum([len(p) for p in {r.prompt for r in rows} if p is not None])
            tokens = len(rows) + batch.drafted
            read = own + shared
            pairs = own + sum([len(r.prompt_ids) for r in rows])
            counted.decode_steps += batch.steps
            counted.decode_seconds += seconds
            counted.drafted_tokens += batch.drafted
            counted.accepted_tokens += batch.sampled - len(rows) * batch.steps
        else:
            tokens = sum(map(len, batch.prefill))
            read = 0
            pairs = sum(len(p) * (2 * p.positions[0] + len(p) + 1) // 2 for p in batch.prefill)
            counted.prefilled_tokens += tokens
            counted.prefill_seconds += seconds
        counted.steps += batch.steps
        counted.sampled_tokens += batch.sampled
        counted.running_requests += running * batch.steps
        counted.waiting_requests += waiting * batch.steps
        counted.peak_running = max(counted.peak_running, len(rows))
        counted.peak_kv_bytes = max(counted.peak_kv_bytes, kv_slots * self.cost.kv_bytes)
        if tokens and self.limits:
            for behind in range(0, len(rows) * batch.steps, len(rows)):  # tokens written since
                least = self.cost.seconds(self.limits, tokens, read - behind, pairs - behind)
                counted.attainable_seconds += least
