"""An unfinished completion, and a request with the rules that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from tunesmith.types import Completion, FinishReason, Sampling

Decode = Callable[[Sequence[int]], str]
Tokens = tuple[list[int], list[float], list[int]]
"""Token ids, their log-probabilities and their versions."""

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes instead of part of a character."""


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """Tokens generated so far, their log-probabilities and weight versions. The lists only grow."""

    token_ids: list[int] = field(default_factory=list[int], init=False)
    logprobs: list[float] = field(default_factory=list[float], init=False)
    versions: list[int] = field(default_factory=list[int], init=False)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(self.token_ids, self.logprobs, self.versions, reason)

    def beyond(self, count: int) -> Tokens:
        """The tokens after the first ones; another thread may be adding some."""
        new = slice(count, len(self.versions))  # a token's version is added last
        return self.token_ids[new], self.logprobs[new], self.versions[new]

    def extend(self, tokens: Tokens) -> None:
        token_ids, logprobs, versions = tokens
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += versions


FOLLOWER: ContextVar[Callable[[PartialCompletion], None] | None] = ContextVar(
    "follower", default=None
)
"""Gets the unfinished completion of a request that is made in its context."""


def follow(completion: PartialCompletion) -> None:
    """Show an unfinished completion to whoever follows its request."""
    follower = FOLLOWER.get()
    if follower is not None:
        follower(completion)


class StopStrings:
    """Watches one completion.

    Text is decoded piece by piece: each piece is the text that the newest tokens add to the
    previous piece, which preserves the tokenizer's treatment of spaces. A piece that ends inside a
    multi-byte character waits for the next token, but is searched up to that character.

    Args:
        least: a stop string that is complete within this many tokens is ignored.
        earlier: tokens before the completion, in which a stop string may begin.
    """

    def __init__(
        self, stop: tuple[str, ...], decode: Decode, least: int = 0, earlier: Sequence[int] = ()
    ) -> None:
        self._stop = stop
        self._decode = decode
        self._least = least
        self._keep = max(len(s) for s in stop) - 1
        self.reach = max(len(s.encode()) for s in stop)
        """The most tokens that a stop string can have: each has at least one byte."""
        self._tail = ""  # the end of the settled text, where a stop string may have begun
        # tokens [context, settled) were the last settled piece; counted from ``earlier[0]``
        self._context = 0
        self._settled = 0
        self._earlier: list[int] = []
        for token in earlier[-self.reach :]:
            self._earlier.append(token)
            self.completed_by(())

    def completed_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of all tokens so far contains a stop string. Call it after every
        token."""
        count = len(self._earlier)
        newest = [*self._earlier[self._context :], *token_ids[max(0, self._context - count) :]]
        before = self._decode(newest[: self._settled - self._context])
        text = self._decode(newest)
        piece = text[len(before) :]
        # A stop string within the tail was found before; a new one begins less than its length
        # before the piece.
        tail = len(self._tail)
        searched = self._tail + piece.rstrip(INCOMPLETE)
        found = any(searched.find(s, max(0, tail - len(s) + 1)) >= 0 for s in self._stop)
        if found and len(token_ids) > self._least:
            return True
        if len(text) > len(before) and not text.endswith(INCOMPLETE):
            self._tail = searched[-self._keep :] if self._keep else ""
            self._context, self._settled = self._settled, count + len(token_ids)
        return False


@dataclass(slots=True, eq=False)
class RunningRequest(PartialCompletion):
    """A prompt and its completion so far."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    """``sampling.max_new_tokens``, or less where the context ends earlier."""
    stop_token_ids: frozenset[int]
    stop_strings: StopStrings | None

    @property
    def length(self) -> int:
        """Tokens of the prompt and the completion so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Add a token; returns the finish reason if it was the last."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_token_ids:
            return "stop"
        if self.stop_strings is not None and self.stop_strings.completed_by(self.token_ids):
            return "stop"
        return "length" if len(self.token_ids) >= self.max_new_tokens else None


def stop_token_ids(sampling: Sampling, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Every token that ends a completion."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def stop_strings(
    prompt_ids: Sequence[int], sampling: Sampling, decode: Decode
) -> StopStrings | None:
    if not sampling.stop:
        return None
    earlier = prompt_ids[len(prompt_ids) - sampling.continued :]
    return StopStrings(sampling.stop, decode, sampling.min_new_tokens, earlier)
