"""The local engine's requests, the prompts they share, and what one step computes of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tunesmith.run.engines.partial import RunningRequest
from tunesmith.run.engines.step_thread import promise
from tunesmith.types import Completion, FinishReason

_CHUNK = 256


class Uniforms:
    """One number in [0, 1) per generated token, from the request's seed alone.

    Philox is counter-based: the n-th number depends only on the seed and n, not on other requests.
    Without a seed the stream is random.
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
    done: Future[Completion] = field(default_factory=promise)
    prompt: CachedPrompt | None = None
    """Set while it runs."""
    row: int = -1
    """Place in the pool, while it runs."""
    cached: int = 0
    """Generated tokens whose keys and values are in the pool."""
    assistant_cached: int = 0
    """The same for the assistant model."""
    seen: Tensor | None = None
    """``[V]`` bool, if repetition is penalised: the prompt's tokens and the first ``marked``
    generated ones. ``V`` is the main model's vocabulary, as it samples before an assistant does."""
    marked: int = 0

    @property
    def kv_length(self) -> int:
        """The most slots that its generated tokens may need; the last token is never read."""
        return max(1, self.max_new_tokens - 1)


def prompt_places(running: Sequence[LocalRequest]) -> list[tuple[int, int]]:
    """The row and the length of each request's prompt."""
    return [(r.prompt.row, len(r.prompt)) for r in running if r.prompt is not None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt, or of a request after its prompt, that are computed together."""

    owner: CachedPrompt | LocalRequest
    start: int
    """Number of the owner's tokens before these."""
    token_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def prompt(self) -> CachedPrompt:
        prompt = self.owner.prompt if isinstance(self.owner, LocalRequest) else self.owner
        assert prompt is not None, "only running requests are computed"
        return prompt

    @property
    def prefix(self) -> int:
        """Length of the prompt before a request's tokens; 0 for a prompt's own piece."""
        return len(self.prompt) if isinstance(self.owner, LocalRequest) else 0

    @property
    def positions(self) -> range:
        return range(self.prefix + self.start, self.prefix + self.stop)


def split_pieces(pieces: Sequence[Piece], max_tokens: int) -> Iterator[list[Piece]]:
    """Forward passes of at most ``max_tokens``; a piece longer than that is cut into chunks."""
    batch: list[Piece] = []
    room = max_tokens
    for piece in pieces:
        for at in range(0, len(piece), max_tokens):
            chunk = Piece(piece.owner, piece.start + at, piece.token_ids[at : at + max_tokens])
            if len(chunk) > room:
                yield batch
                batch = []
                room = max_tokens
            batch.append(chunk)
            room -= len(chunk)
    if batch:
        yield batch


@dataclass(slots=True)
class StepBatch:
    """What one step computes: the requests that start, or the next tokens of all running ones, by
    row."""

    requests: Sequence[LocalRequest]
    prefill: Sequence[Piece] | None = None
    """Prompts and earlier tokens of the requests that start; None in a decode step."""
    drafts: list[list[int]] = field(init=False)
    """For each request, draft tokens that a decode step verifies."""
    sampled: int = 0
    """Tokens that were appended to the requests."""

    def __post_init__(self) -> None:
        self.drafts = [[] for _ in self.requests]

    def states(self) -> tuple[list[LocalRequest], list[list[int]]]:
        """The request of each hidden state that is sampled from, and the draft tokens that the
        state has read."""
        rows = zip(self.requests, self.drafts, strict=True)
        requests = [request for request, draft in rows for _ in range(len(draft) + 1)]
        return requests, [draft[:read] for draft in self.drafts for read in range(len(draft) + 1)]

    def append(
        self, tokens: list[int], logprobs: list[float], version: int
    ) -> dict[LocalRequest, FinishReason]:
        """Append the tokens sampled from each request's states, up to the first that differs from
        its draft.

        Returns:
            The requests that ended, and why.
        """
        ended: dict[LocalRequest, FinishReason] = {}
        first = 0
        for request, draft in zip(self.requests, self.drafts, strict=True):
            for state, guess in enumerate([*draft, None], first):
                self.sampled += 1
                reason = request.append(tokens[state], logprobs[state], version)
                if reason is not None:
                    ended[request] = reason
                if reason is not None or tokens[state] != guess:
                    break
            first += len(draft) + 1
            request.cached = len(request.token_ids) - 1
        return ended
