"""The protocols that every engine implements: in-process, vLLM, SGLang or fake; and an engine's
counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from tunesmith.errors import EngineError, UserError
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, Sampling


@dataclass(slots=True)
class EngineStats:
    """An engine's counters since its start; times in seconds, memory in bytes."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reused_prompt_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps: int = 0
    """Steps that decoded or prefilled."""
    running_requests: int = 0
    """Requests that had a place, added up over the steps."""
    waiting_requests: int = 0
    """The same for those that had none."""
    preemptions: int = 0
    drafted_tokens: int = 0
    """Tokens that speculative decoding drafted and verified; ``accepted_tokens`` of them were
    kept."""
    accepted_tokens: int = 0
    peak_running: int = 0
    peak_kv_bytes: int = 0
    kv_budget_bytes: int = 0
    attainable_seconds: float = 0.0
    """The least time these steps could have taken (the larger of bytes / bandwidth and flops /
    rate); 0 where the hardware's limits are not known."""
    sync_bytes: int = 0
    """Bytes of new weights that engines with their own copy have taken, all together."""
    sync_seconds: float = 0.0
    """Time in which they were published and taken."""

    def since(self, earlier: EngineStats) -> EngineStats:
        """The counts since ``earlier``; peaks and budgets still cover the whole time."""

        def value(name: str) -> Any:
            return getattr(self, name) - (0 if name in _PEAKS else getattr(earlier, name))

        return EngineStats(**{f.name: value(f.name) for f in fields(EngineStats)})


_PEAKS = ("peak_running", "peak_kv_bytes", "kv_budget_bytes")
_NAMES = tuple(f.name for f in fields(EngineStats))
_IS_PEAK = tuple(name in _PEAKS for name in _NAMES)
_values = attrgetter(*_NAMES)


def add_stats(total: EngineStats, more: EngineStats, *, separate: bool = False) -> EngineStats:
    """Counters add up; peaks and budgets are the highest, or add up if the engines are
    ``separate``. Engines do it at each step."""
    parts = zip(_values(total), _values(more), _IS_PEAK, strict=True)
    every = (max(a, b) if is_peak and not separate else a + b for a, b, is_peak in parts)
    return EngineStats(*every)


LARGEST_FACTOR = 1e15
"""By which logits are multiplied or divided, twice, without an overflow of float32."""


class Sampler(Protocol):
    """Generates completions, and frees its memory for the trainer. All methods are called from one
    event loop."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Complete one prompt. Called concurrently; equal prompts are prefilled once.

        Cancelling the awaiting task aborts the request and frees its memory.

        Raises:
            UserError: prompt and completion can never fit the KV budget, or the prompt alone fills
                the model's context; or a sampling setting is out of its range.
            EngineError: generation failed.
        """
        ...

    def stats(self) -> EngineStats:
        """All counters since the engine started; reading does not reset them."""
        ...

    async def interrupt(self) -> None:
        """End every request in flight with the tokens it has, ``finish_reason="abort"``."""

    async def sleep(self, level: int = 1) -> None:
        """Free the KV memory; requests in flight must have ended.

        Args:
            level: 1 moves the engine's own weights off the device; 2 discards them, and
                ``load_weights`` must be called before the next request, possibly before ``wake``.
        """

    async def wake(self) -> None:
        """Reallocate the KV memory."""

    async def close(self) -> None: ...


class RolloutEngine(Sampler, Protocol):
    """An engine that samples with the trainer's weights."""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        ...

    async def load_weights(self, version: int) -> None:
        """Load the trainer's current weights as ``version``; cached prefixes of older ones are
        dropped.

        Requests in flight continue: their later tokens carry the new version. If loading fails, the
        weights may be a mix of versions; all requests, in flight or new, then wait until a load
        succeeds.
        """


class Member(Sampler, Protocol):
    """One engine of a pool, in another process; it receives weights as an offer (``weights.base``).

    ``stats`` returns the newest counters that came with the engine's answers.

    Every call raises ``EngineLostError`` once the engine is dead.
    """

    @property
    def name(self) -> str: ...

    async def take(self, version: int, offer: Offer) -> None:
        """Load offered weights; requests in flight continue with them."""


TokenScore = tuple[float, dict[int, float]]
"""A token's log-probability, and the likeliest tokens in its place with theirs."""


@runtime_checkable
class PromptScorer(Protocol):
    """What only some engines can."""

    async def score(self, token_ids: Sequence[int], top: int) -> list[TokenScore]:
        """The scores of all tokens but the first, without sampling settings, and of ``top``
        alternatives each."""
        ...


class RunningEngine(Protocol):
    """One of several engines, with its number from 0."""

    number: int
    member: Member
    publication: int
    """Counts the weights that it was given; 0: none."""
    version: int
    """The version of these weights."""


def check_idle(count: int) -> None:
    """Raises EngineError: requests are in flight, so that the engine cannot sleep."""
    if count:
        raise EngineError(f"{count} requests are in flight: an engine sleeps when they have ended")


def check_sampling(sampling: Sampling) -> None:
    """Reject settings that make no sense.

    Raises:
        UserError: a setting is out of its range.
    """
    s = sampling
    factors = f"{1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}"

    def divides(factor: float) -> bool:
        return 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR

    ranges = {
        "max_new_tokens": (s.max_new_tokens >= 1, "at least 1"),
        "temperature": (s.temperature == 0 or divides(s.temperature), f"0 (greedy) or {factors}"),
        "top_p": (0 < s.top_p <= 1, "above 0 and at most 1"),
        "top_k": (s.top_k >= 0, "0 (off) or a positive number"),
        "repetition_penalty": (divides(s.repetition_penalty), f"{factors}; 1 is off"),
        "min_new_tokens": (0 <= s.min_new_tokens <= s.max_new_tokens, "0 to max_new_tokens"),
        "min_p": (0 <= s.min_p < 1, "at least 0 and below 1"),
        "continued": (s.continued >= 0, "0 (a new completion) or more"),
        "stop": (all(s.stop), "strings of at least one character"),
    }
    for name, (valid, expected) in ranges.items():
        if not valid:
            value = getattr(sampling, name)
            raise UserError(f"sampling.{name} = {value!r} is out of range: use {expected}")
