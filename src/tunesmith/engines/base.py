"""The port that every sampler fulfils: in process, vLLM, HTTP or fake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from tunesmith.errors import UserError
from tunesmith.types import Completion, Sampling
from tunesmith.weights.base import Offer


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine has counted since it started; times in seconds, memory in bytes."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reused_prompt_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    preemptions: int = 0
    drafted_tokens: int = 0
    """Guessed by speculative decoding and verified; ``accepted_tokens`` of them were kept."""
    accepted_tokens: int = 0
    peak_running: int = 0
    peak_kv_bytes: int = 0
    kv_budget_bytes: int = 0
    attainable_seconds: float = 0.0
    """Least time the same steps could have taken (the larger of bytes / bandwidth and flops / rate);
    0 where the hardware's limits are not known."""

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was counted after ``earlier``. Peaks and budgets are those of the whole time."""

        def value(name: str) -> Any:
            return getattr(self, name) - (0 if name in _PEAKS else getattr(earlier, name))

        return EngineStats(**{f.name: value(f.name) for f in fields(EngineStats)})


_PEAKS = ("peak_running", "peak_kv_bytes", "kv_budget_bytes")


def add_stats(total: EngineStats, more: EngineStats, *, apart: bool = False) -> EngineStats:
    """Both together: counters add up; peaks and budgets are the highest, or add up where the engines are ``apart``."""

    def value(name: str) -> Any:
        a, b = getattr(total, name), getattr(more, name)
        return max(a, b) if name in _PEAKS and not apart else a + b

    return EngineStats(**{f.name: value(f.name) for f in fields(EngineStats)})


class RolloutEngine(Protocol):
    """Generates completions. All methods are called from one event loop."""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Complete one prompt; call it concurrently, equal prompts are prefilled once.

        Cancelling the awaiting task aborts the request and frees its memory.

        Raises:
            UserError: prompt and completion can never fit the KV budget, or the prompt alone fills the
                model's context; or a sampling setting is out of its range.
            EngineError: generation failed.
        """
        ...

    async def interrupt(self) -> None:
        """End every request in flight with the tokens it has, ``finish_reason="abort"``."""
        ...

    async def load_weights(self, version: int) -> None:
        """Take the trainer's current weights as ``version``; every cached prefix dies with the old one.

        Requests in flight continue: their later tokens carry the new version.
        """
        ...

    async def sleep(self, level: int = 1) -> None:
        """Free the KV memory; requests in flight must have ended.

        Args:
            level: what becomes of weights of the engine's own: 1 keeps them off the device, 2 discards them, so
                that ``load_weights`` has to come before the next request. It may come before ``wake``.
        """
        ...

    async def wake(self) -> None:
        """Take the KV memory back."""
        ...

    def stats(self) -> EngineStats:
        """Everything counted since the engine started; reading changes nothing."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Resizable(Protocol):
    """What several engines behind one port can besides."""

    async def resize(self, size: int) -> None:
        """Go on with another number of engines. One that leaves finishes what it was asked."""
        ...


class Member(Protocol):
    """An engine elsewhere, one of a pool: its weights come as an offer (``weights.base``).

    Every call raises ``EngineLostError`` when the engine is no more.
    """

    @property
    def name(self) -> str: ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion: ...

    async def interrupt(self) -> None: ...

    async def take(self, version: int, offer: Offer) -> None:
        """Take offered weights; requests in flight continue with them."""
        ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...

    def stats(self) -> EngineStats:
        """The newest counters that the engine's answers have brought."""
        ...

    async def close(self) -> None: ...


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that mean nothing.

    Raises:
        UserError: a setting is out of its range.
    """
    ranges = {
        "max_new_tokens": (sampling.max_new_tokens >= 1, "at least 1"),
        "temperature": (0 <= sampling.temperature < float("inf"), "0 (greedy) or a positive number"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "0 (off) or a positive number"),
        "repetition_penalty": (0 < sampling.repetition_penalty < float("inf"), "a positive number; 1 is off"),
        "min_new_tokens": (
            0 <= sampling.min_new_tokens <= sampling.max_new_tokens,
            "at least 0 and at most max_new_tokens",
        ),
        "min_p": (0 <= sampling.min_p < 1, "at least 0 and below 1"),
        "stop": (all(sampling.stop), "strings of at least one character"),
    }
    for name, (valid, expected) in ranges.items():
        if not valid:
            raise UserError(f"sampling.{name} = {getattr(sampling, name)!r} is out of range: use {expected}")
