"""An engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's counters since its start; times in seconds, memory in bytes."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reused_prompt_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    preemptions: int = 0
    drafted_tokens: int = 0
    """Tokens that speculative decoding drafted and verified; ``accepted_tokens`` of them were kept."""
    accepted_tokens: int = 0
    peak_running: int = 0
    peak_kv_bytes: int = 0
    kv_budget_bytes: int = 0
    attainable_seconds: float = 0.0
    """The least time these steps could have taken (the larger of bytes / bandwidth and flops / rate);
    0 where the hardware's limits are not known."""

    def since(self, earlier: EngineStats) -> EngineStats:
        """The counts since ``earlier``; peaks and budgets still cover the whole time."""

        def value(name: str) -> Any:
            return getattr(self, name) - (0 if name in _PEAKS else getattr(earlier, name))

        return EngineStats(**{f.name: value(f.name) for f in fields(EngineStats)})


_PEAKS = ("peak_running", "peak_kv_bytes", "kv_budget_bytes")


def add_stats(total: EngineStats, more: EngineStats, *, separate: bool = False) -> EngineStats:
    """Counters add up; peaks and budgets are the highest, or add up if the engines are ``separate``."""

    def value(name: str) -> Any:
        a, b = getattr(total, name), getattr(more, name)
        return max(a, b) if name in _PEAKS and not separate else a + b

    return EngineStats(**{f.name: value(f.name) for f in fields(EngineStats)})
