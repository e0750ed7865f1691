"""An unfinished completion, and a request with the rules that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tunesmith.engines.stopping import StopStrings
from tunesmith.types import Completion, FinishReason, Sampling


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """Tokens generated so far, their log-probabilities and weight versions. The lists only grow."""

    token_ids: list[int] = field(default_factory=list[int], init=False)
    logprobs: list[float] = field(default_factory=list[float], init=False)
    versions: list[int] = field(default_factory=list[int], init=False)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(self.token_ids, self.logprobs, self.versions, reason)


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
    prompt_ids: Sequence[int], sampling: Sampling, decode: Callable[[Sequence[int]], str]
) -> StopStrings | None:
    if not sampling.stop:
        return None
    earlier = prompt_ids[len(prompt_ids) - sampling.continued :]
    return StopStrings(sampling.stop, decode, sampling.min_new_tokens, earlier)
