"""What the engine counts, and the least time its steps could have taken (FORMULAS, "Limits")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.engines.base import EngineStats
from tunesmith.engines.local.prefill_attention import Piece
from tunesmith.engines.local.requests import Request
from tunesmith.plan.hardware import Limits


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one forward pass reads and computes."""

    weight_bytes: int
    """Of every parameter that a token passes through, head included, embedding table not."""
    weights: int
    kv_bytes: int
    """Per token, all layers."""
    attention_flops: int
    """Per pair of query and key, all layers: ``4 * layers * heads * head_dim``."""

    def seconds(self, limits: Limits, tokens: int, kv_read: int, pairs: int) -> float:
        """Of a pass over ``tokens`` new tokens that reads ``kv_read`` cached ones."""
        read = self.weight_bytes + self.kv_bytes * kv_read
        flops = 2 * self.weights * tokens + self.attention_flops * pairs
        return max(read / limits.bytes_per_second, flops / limits.flops_per_second)


@dataclass(slots=True)
class Meter:
    """Counters since it was made."""

    cost: ModelCost
    limits: Limits | None
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    attainable_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    peak_running: int = 0
    peak_kv_slots: int = 0

    def decoded(self, running: Sequence[Request], drafted: int, accepted: int, kv_slots: int, seconds: float) -> None:
        """One decode step of ``running``, which verified ``drafted`` tokens, before they end."""
        self.sampled_tokens += len(running) + accepted
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.decode_steps += 1
        self.decode_seconds += seconds
        self._peak(len(running), kv_slots)
        if self.limits is not None:
            own = sum(r.cached for r in running)
            shared = sum(len(p) for p in {r.prompt for r in running} if p is not None)
            pairs = own + sum(len(r.prompt_ids) for r in running)
            self.attainable_seconds += self.cost.seconds(self.limits, len(running) + drafted, own + shared, pairs)

    def prefilled(self, pieces: Sequence[Piece], admitted: Sequence[Request], kv_slots: int, seconds: float) -> None:
        """One prefill, from which the ``admitted`` drew a token."""
        tokens = sum(map(len, pieces))
        self.sampled_tokens += len(admitted)
        self.prefilled_tokens += tokens
        self.prefill_seconds += seconds
        self._peak(len(admitted), kv_slots)
        if self.limits is not None and pieces:
            pairs = sum(len(p) * (2 * p.positions[0] + len(p) + 1) // 2 for p in pieces)
            self.attainable_seconds += self.cost.seconds(self.limits, tokens, 0, pairs)

    def _peak(self, running: int, kv_slots: int) -> None:
        self.peak_running = max(self.peak_running, running)
        self.peak_kv_slots = max(self.peak_kv_slots, kv_slots)

    def stats(self, *, reused: int, preemptions: int, budget: int) -> EngineStats:
        return EngineStats(
            sampled_tokens=self.sampled_tokens,
            prefilled_tokens=self.prefilled_tokens,
            reused_prompt_tokens=reused,
            decode_steps=self.decode_steps,
            decode_seconds=self.decode_seconds,
            prefill_seconds=self.prefill_seconds,
            preemptions=preemptions,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            peak_running=self.peak_running,
            peak_kv_bytes=self.peak_kv_slots * self.cost.kv_bytes,
            kv_budget_bytes=budget,
            attainable_seconds=self.attainable_seconds,
        )
