"""The local engine's requests, the prompts they share, and what one step computes of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from tunesmith.models.kernels.decoding import KVSpan
from tunesmith.models.vision.rows import next_cut
from tunesmith.run.engines.partial import RunningRequest
from tunesmith.run.engines.step_thread import promise
from tunesmith.types import Completion, ExpertChoices, FinishReason

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
    rotary_length: int
    """The length its keys are rotated for; see ``LengthRule.alike``."""
    span: KVSpan
    running: int = 0
    """Requests that use it now."""
    rotary: Tensor | None = None
    """``[3, tokens]``, the rotary positions of its tokens; None as long as they are not known, or
    if the model sees no images."""
    shift: int = 0
    """By which the rotary positions after it differ from the places in the sequence."""
    last_hidden: Tensor | None = None
    """``[d]`` at its last token; every request of the group samples its first token from it."""
    experts: bytearray = field(default_factory=bytearray)
    """The experts that its tokens chose, int16 ``[tokens, routers, chosen]``, where they are
    recorded."""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return self.token_ids, self.rotary_length

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
    span: KVSpan = field(default_factory=lambda: KVSpan([]))
    """Where the keys and values of its generated tokens are, while it runs."""
    cached: int = 0
    """Generated tokens whose keys and values are in the pool."""
    seen: Tensor | None = None
    """``[V]`` bool, if repetition is penalised: the prompt's tokens and the first ``marked``
    generated ones."""
    marked: int = 0
    of_prompt: bytearray = field(default_factory=bytearray)
    """The experts that the prompt's tokens chose, where they are recorded."""
    experts: bytearray = field(default_factory=bytearray)
    """The same for its own, each as it was read first."""

    def completion(self, reason: FinishReason) -> Completion:
        done = Completion(self.token_ids, self.logprobs, self.versions, reason)
        if not self.of_prompt:
            return done
        width = len(self.of_prompt) // len(self.prompt_ids)
        return replace(done, experts=ExpertChoices(width, bytes(self.of_prompt + self.experts)))

    @property
    def kv_length(self) -> int:
        """The most slots that its generated tokens may need; the last token is never read."""
        return max(1, self.max_new_tokens - 1)

    @property
    def first_slots(self) -> int:
        """The slots with which it starts: for what it has written, and the next token."""
        return min(len(self.token_ids) + 1, self.kv_length)

    @property
    def rotary_length(self) -> int:
        assert self.prompt is not None, "only running requests are rotated"
        return self.prompt.rotary_length

    @property
    def shift(self) -> int:
        """See ``CachedPrompt.shift``."""
        assert self.prompt is not None, "only running requests have positions"
        return self.prompt.shift

    def forget(self) -> None:
        """Called once it no longer runs and its blocks are released."""
        self.prompt = None
        self.span = KVSpan([])
        self.cached = 0


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


def split_pieces(
    pieces: Sequence[Piece], max_tokens: int, *, whole_images: bool = False
) -> Iterator[list[Piece]]:
    """Forward passes of at most ``max_tokens``; a piece longer than that is cut into chunks.

    Args:
        whole_images: cut no image; one that is longer has a chunk for itself.
    """
    batch: list[Piece] = []
    room = max_tokens
    for chunk in _chunks(pieces, max_tokens, whole_images=whole_images):
        if batch and len(chunk) > room:
            yield batch
            batch = []
            room = max_tokens
        batch.append(chunk)
        room -= len(chunk)
    if batch:
        yield batch


def _chunks(pieces: Sequence[Piece], max_tokens: int, *, whole_images: bool) -> Iterator[Piece]:
    for piece in pieces:
        start = 0
        while start < len(piece):
            stop = start + max_tokens
            if whole_images:
                stop = next_cut(piece.token_ids, start, max_tokens)
            yield Piece(piece.owner, piece.start + start, piece.token_ids[start:stop])
            start = stop


@dataclass(slots=True)
class StepBatch:
    """What one step computes: the requests that start, or the next tokens of all running ones."""

    requests: Sequence[LocalRequest]
    prefill: Sequence[Piece] | None = None
    """Prompts and earlier tokens of the requests that start; None in a decode step."""
    sampled: int = 0
    """Tokens that were appended to the requests."""
    drafted: int = 0
    """Guessed tokens that were checked."""
    steps: int = 1
    """Decode steps, each of which gave every request a token; guessed tokens come in one."""

    def append(
        self,
        requests: Sequence[LocalRequest],
        tokens: list[int],
        logprobs: list[float],
        version: int,
    ) -> dict[LocalRequest, FinishReason]:
        """Append a token to each request; returns those that ended, and why."""
        ended: dict[LocalRequest, FinishReason] = {}
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            reason = request.append(token, logprob, version)
            if reason is not None:
                ended[request] = reason
            request.cached = len(request.token_ids) - 1
        self.sampled += len(requests)
        return ended
