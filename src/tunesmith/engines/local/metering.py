"""Counts an engine's steps, and the least time they could have taken (``ForwardCost.seconds``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.engines.local.prefill_attention import Piece
from tunesmith.engines.local.requests import LocalRequest
from tunesmith.engines.stats import EngineStats, add_stats
from tunesmith.plan.cost.operations import ForwardCost, PeakRates


@dataclass(slots=True)
class Meter:
    """Counters of an engine's steps."""

    cost: ForwardCost
    limits: PeakRates | None
    counted: EngineStats = field(default_factory=EngineStats)

    def decoded(
        self, running: Sequence[LocalRequest], drafted: int, accepted: int, kv_slots: int, seconds: float
    ) -> None:
        """Count a decode step of ``running`` that verified ``drafted`` tokens, before any request is released."""
        own = sum(r.cached for r in running)
        shared = sum(len(p) for p in {r.prompt for r in running} if p is not None)
        pairs = own + sum(len(r.prompt_ids) for r in running)
        step = EngineStats(
            sampled_tokens=len(running) + accepted,
            decode_steps=1,
            decode_seconds=seconds,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            peak_running=len(running),
            peak_kv_bytes=kv_slots * self.cost.kv_bytes,
            attainable_seconds=self._least_seconds(len(running) + drafted, own + shared, pairs),
        )
        self.counted = add_stats(self.counted, step)

    def prefilled(self, pieces: Sequence[Piece], admitted: int, kv_slots: int, seconds: float) -> None:
        """Count a prefill from which ``admitted`` requests sampled a token."""
        tokens = sum(map(len, pieces))
        pairs = sum(len(p) * (2 * p.positions[0] + len(p) + 1) // 2 for p in pieces)
        step = EngineStats(
            sampled_tokens=admitted,
            prefilled_tokens=tokens,
            prefill_seconds=seconds,
            peak_running=admitted,
            peak_kv_bytes=kv_slots * self.cost.kv_bytes,
            attainable_seconds=self._least_seconds(tokens, 0, pairs) if pieces else 0.0,
        )
        self.counted = add_stats(self.counted, step)

    def _least_seconds(self, tokens: int, kv_read: int, pairs: int) -> float:
        return 0.0 if self.limits is None else self.cost.seconds(self.limits, tokens, kv_read, pairs)
