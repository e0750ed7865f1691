"""The port that every sampler fulfils: in process, vLLM, HTTP or fake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    peak_running: int = 0
    peak_kv_bytes: int = 0
    kv_budget_bytes: int = 0
    attainable_seconds: float = 0.0
    """Least time the same steps could have taken (FORMULAS: max of bytes / bandwidth, flops / rate)."""


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
            UserError: the prompt alone does not fit the KV budget or the model's context.
            EngineError: generation failed.
        """
        ...

    async def load_weights(self, version: int) -> None:
        """Take the trainer's current weights as ``version``; every cached prefix dies with the old one."""
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
