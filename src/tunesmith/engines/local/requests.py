"""The local engine's requests, and the prompts they share."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tunesmith.engines.partial import RunningRequest
from tunesmith.types import Completion

_CHUNK = 256


class Uniforms:
    """One number in [0, 1) per generated token, from the request's seed alone.

    Philox is counter-based: the n-th number depends only on the seed and n, not on other requests. Without a seed the
    stream is random.
    """

    def __init__(self, seed: int | None) -> None:
        key = secrets.randbits(64) if seed is None else seed % 2**64
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._numbers: list[float] = []

    def __getitem__(self, index: int) -> float:
        while index >= len(self._numbers):
            self._numbers.extend(self._generator.random(_CHUNK).tolist())
        return self._numbers[index]


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """A prompt whose keys and values are in the pool, shared by equal requests."""

    token_ids: tuple[int, ...]
    rotary_length: int = 1
    """The length its keys are rotated for; see ``LengthRule.alike``."""
    stale: bool = False
    """Computed with old weights: no new request may use it."""
    row: int = -1
    """Place in the pool."""
    running: int = 0
    """Requests that use it now."""
    used_at: int = 0
    """When it was last used, in admissions."""
    last_hidden: Tensor | None = None
    """``[d]`` at its last token; every request of the group samples its first token from it."""
    assistant_ready: bool = False
    """Whether the assistant model's keys and values are in the pool too."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class LocalRequest(RunningRequest):
    """A request to the local engine."""

    id: int
    uniforms: Uniforms
    done: Future[Completion] = field(default_factory=Future[Completion])
    prompt: CachedPrompt | None = None
    """Set while it runs."""
    row: int = -1
    """Place in the pool, while it runs."""
    cached: int = 0
    """Generated tokens whose keys and values are in the pool."""
    assistant_cached: int = 0
    """The same for the assistant model."""
    seen: Tensor | None = None
    """``[V]`` bool, if repetition is penalised: the prompt's tokens and the first ``marked`` generated ones. ``V`` is
    the main model's vocabulary, as it samples before an assistant does."""
    marked: int = 0

    @property
    def kv_length(self) -> int:
        """The most slots that its generated tokens may need; the last token is never read."""
        return max(1, self.max_new_tokens - 1)
