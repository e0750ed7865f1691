"""What the engine works on: requests, and the prompts they share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tunesmith.types import Completion, FinishReason, Sampling

if TYPE_CHECKING:
    import asyncio

    from tunesmith.engines.local.stopping import StopStrings

_CHUNK = 256


class Uniforms:
    """One number in [0, 1) per written token, from the request's seed alone.

    Philox is counter-based: the n-th number depends on the seed and n, never on what else runs.
    Without a seed the stream is fresh.
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
    """A prompt whose keys and values stand in one row of the prompt bank, shared by equal requests."""

    token_ids: tuple[int, ...]
    length: int = 1
    """Of the sequences that its keys are rotated for; see ``LengthRule.alike``."""
    stale: bool = False
    """Computed with weights that are no longer current: serves nobody new."""
    row: int = -1
    running: int = 0
    """Requests that decode against it now."""
    used_at: int = 0
    """Time of last use, in engine steps."""
    last_hidden: Tensor | None = None
    """``[d]`` at its last token: what the first token of every sibling is drawn from."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class Request:
    """One completion in the making. ``token_ids``, ``logprobs`` and ``versions`` only ever grow."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    """``sampling.max_new_tokens``, or less where the model's context ends before."""
    stop_token_ids: frozenset[int]
    future: asyncio.Future[Completion]
    uniforms: Uniforms
    stop_strings: StopStrings | None = None
    prompt: CachedPrompt | None = None
    """While running."""
    cached: int = 0
    """Own tokens whose keys and values stand in the completion bank."""
    draft_cached: int = 0
    """Own tokens of which the same is true in a draft model's bank."""
    draft: list[int] = field(default_factory=list[int])
    """What the draft model last proposed behind those; in its bank stands all but the last."""
    seen: Tensor | None = None
    """``[V]`` bool, where repetition is penalised: the prompt's tokens and the first ``marked`` of its own."""
    marked: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    @property
    def length(self) -> int:
        """Of prompt and completion so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def kv_length(self) -> int:
        """Completion slots it needs to the end; the last token's are never needed."""
        return max(1, self.max_new_tokens - 1)

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Take a sampled token; the reason to finish, if that was the last."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_token_ids:
            return "stop"
        if self.stop_strings is not None and self.stop_strings.completed_by(self.token_ids):
            return "stop"
        return "length" if len(self.token_ids) >= self.max_new_tokens else None
