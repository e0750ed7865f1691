"""The protocols that every engine implements: in-process, vLLM, SGLang or fake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tunesmith.engines.stats import EngineStats
from tunesmith.errors import UserError
from tunesmith.types import Completion, Sampling
from tunesmith.weights.base import Offer


class Sampler(Protocol):
    """Generates completions, and frees its memory for the trainer. All methods are called from one event loop."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Complete one prompt. Called concurrently; equal prompts are prefilled once.

        Cancelling the awaiting task aborts the request and frees its memory.

        Raises:
            UserError: prompt and completion can never fit the KV budget, or the prompt alone fills the
                model's context; or a sampling setting is out of its range.
            EngineError: generation failed.
        """
        ...

    def stats(self) -> EngineStats:
        """All counters since the engine started; reading does not reset them."""
        ...

    async def interrupt(self) -> None:
        """End every request in flight with the tokens it has, ``finish_reason="abort"``."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Free the KV memory; requests in flight must have ended.

        Args:
            level: 1 moves the engine's own weights off the device; 2 discards them, and ``load_weights`` must be
                called before the next request, possibly before ``wake``.
        """
        ...

    async def wake(self) -> None:
        """Reallocate the KV memory."""
        ...

    async def close(self) -> None: ...


class RolloutEngine(Sampler, Protocol):
    """An engine that samples with the trainer's weights."""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        ...

    async def load_weights(self, version: int) -> None:
        """Load the trainer's current weights as ``version``; cached prefixes of older ones are dropped.

        Requests in flight continue: their later tokens carry the new version. If loading fails, the weights may be a
        mix of versions; all requests, in flight or new, then wait until a load succeeds.
        """
        ...


class Member(Sampler, Protocol):
    """One engine of a pool, in another process; it receives weights as an offer (``weights.base``).

    ``stats`` returns the newest counters that came with the engine's answers.

    Every call raises ``EngineLostError`` once the engine is dead.
    """

    @property
    def name(self) -> str: ...

    async def take(self, version: int, offer: Offer) -> None:
        """Load offered weights; requests in flight continue with them."""
        ...


def check_sampling(sampling: Sampling) -> None:
    """Reject settings that make no sense.

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
        "continued": (sampling.continued >= 0, "0 (a new completion) or more"),
        "stop": (all(sampling.stop), "strings of at least one character"),
    }
    for name, (valid, expected) in ranges.items():
        if not valid:
            raise UserError(f"sampling.{name} = {getattr(sampling, name)!r} is out of range: use {expected}")
