"""The port that every sampler fulfils: in process, vLLM, HTTP or fake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tunesmith.errors import UserError
from tunesmith.types import Completion, Sampling


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the last call of ``stats``; times in seconds, memory in bytes."""

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
    """Least time the same steps could have taken (FORMULAS: max of bytes / bandwidth, flops / rate);
    0 where the hardware's limits are not known."""


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

    async def load_weights(self, version: int) -> None:
        """Take the trainer's current weights as ``version``; every cached prefix dies with the old one.

        Requests in flight continue: their later tokens carry the new version.
        """
        ...

    async def sleep(self) -> None:
        """Free the KV memory; requests in flight must have ended."""
        ...

    async def wake(self) -> None:
        """Take the KV memory back."""
        ...

    def stats(self) -> EngineStats:
        """Counters since the last call."""
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
        "min_p": (0 <= sampling.min_p < 1, "at least 0 and below 1"),
        "stop": (all(sampling.stop), "strings of at least one character"),
    }
    for name, (valid, expected) in ranges.items():
        if not valid:
            raise UserError(f"sampling.{name} = {getattr(sampling, name)!r} is out of range: use {expected}")
