"""Speculative decoding: several tokens of a request in one pass, where a cheap guess of them was right.

The model reads the guessed tokens in one pass and draws its own token at every one of their places, with the
number that plain decoding would use there (``Uniforms``). Guesses count as far as they are what it drew; the
first other token it drew is kept in place of the guess. So the tokens are those of plain decoding, one by
one: for a guess without chance in it this is the rejection sampling of Leviathan et al. 2023 (arXiv:2211.17192,
a point mass as the proposal), accepted with the model's probability of the guess. A draft model draws with the
same numbers, which accepts somewhat less than their maximal coupling would, but leaves a seed its one
completion: what is drafted, and whether, may then depend on the clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tunesmith.engines.local.prefill_attention import Piece
from tunesmith.engines.local.requests import Request
from tunesmith.errors import UserError
from tunesmith.models.causal_lm import CausalLM

TRIAL = 12
"""Decode steps of either kind before they are compared."""
RETRY = 64
"""Decode steps between two of the slower kind, so that it is noticed when that changes."""
_MEMORY = 0.9
"""Share of what was measured that counts after one more step."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to guess."""

    tokens: int
    """Guessed at most, per request and step."""
    draft: CausalLM | None = None
    """None looks n-grams up."""
    report: Callable[[str], object] | None = None
    """Is told in the end where guesses paid."""

    def check(self, model: CausalLM) -> None:
        """Refuse what cannot work with this model.

        Raises:
            UserError: no tokens are wanted, or the draft model has another vocabulary or a shorter context.
        """
        if self.tokens < 1:
            raise UserError(f"speculative_tokens = {self.tokens} guesses nothing: use at least 1")
        if self.draft is None:
            return
        if self.draft.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            raise UserError(
                "the draft model (system.draft_model) has another vocabulary than the model: use a smaller "
                'model of the same family, or system.speculative = "ngram"'
            )
        reads, needed = (lm.module.config.get_text_config().max_position_embeddings for lm in (self.draft, model))
        if reads < needed:
            raise UserError(
                f"the draft model (system.draft_model) reads at most {reads} tokens, but the model {needed}: use "
                'one that reads as many, or system.speculative = "ngram"'
            )


class Drafter(Protocol):
    """Guesses what running requests write next."""

    def propose(self, running: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """At most ``most[i]`` (possibly no more than zero) tokens for each request, which stand by row."""
        ...

    def fill(self, pieces: Sequence[Piece]) -> None:
        """The engine has read these pieces."""
        ...

    def finished(self, requests: Iterable[Request]) -> None:
        """These ended."""
        ...


class Switch:
    """Whether drafts pay, measured in decode seconds per written token, apart for each power of two of rows."""

    def __init__(self) -> None:
        self._paces: defaultdict[tuple[int, bool], _Pace] = defaultdict(_Pace)

    def on(self, rows: int) -> bool:
        """Whether to draft in the next step of so many rows."""
        drafted, plain = (self._paces[rows.bit_length(), kind] for kind in (True, False))
        if min(drafted.steps, plain.steps) < TRIAL:
            return drafted.steps <= plain.steps
        better = drafted.seconds_per_token < plain.seconds_per_token
        faster, slower = (drafted, plain) if better else (plain, drafted)
        return better if faster.steps - slower.others < RETRY else not better

    def measured(self, rows: int, drafted: bool, seconds: float, tokens: int) -> None:
        """One step, with drafts or without."""
        pace, other = (self._paces[rows.bit_length(), kind] for kind in (drafted, not drafted))
        pace.add(seconds, tokens)
        pace.others = other.steps

    def verdict(self) -> str:
        """For people: where drafts paid."""
        found: list[str] = []
        for bits in sorted({bits for bits, _ in self._paces}):
            drafted, plain = (self._paces[bits, kind] for kind in (True, False))
            if min(drafted.steps, plain.steps) >= TRIAL:
                ratio = plain.seconds_per_token / drafted.seconds_per_token
                rows = f"{1 << (bits - 1)}-{(1 << bits) - 1}" if bits > 1 else "1"
                found.append(f"{rows} requests: {ratio:.2f} times as fast, {'on' if ratio > 1 else 'off'}")
        return "; ".join(found)


class Guesses:
    """What the engine asks: a drafter, and whether to use it."""

    def __init__(self, drafter: Drafter, speculation: Speculation) -> None:
        self._drafter = drafter
        self._tokens, self._report = speculation.tokens, speculation.report
        self._switch = Switch()
        self._tried = False

    def propose(self, running: Sequence[Request], capacity: int) -> list[list[int]]:
        """For each request tokens that it may write next, within its length and its row's ``capacity``."""
        self._tried = self._switch.on(len(running))
        if not self._tried:
            return [[] for _ in running]
        most = [min(self._tokens, min(r.kv_length, capacity) - r.cached - 1) for r in running]
        return self._drafter.propose(running, most)

    def measured(self, rows: int, seconds: float, tokens: int) -> None:
        """How long the step took that these were proposed for, and what was written."""
        self._switch.measured(rows, self._tried, seconds, tokens)

    def fill(self, pieces: Sequence[Piece]) -> None:
        self._drafter.fill(pieces)

    def finished(self, requests: Iterable[Request]) -> None:
        self._drafter.finished(requests)

    def close(self) -> None:
        """Say what was measured."""
        if self._report is not None and (verdict := self._switch.verdict()):
            self._report(f"speculative decoding: {verdict}")


@dataclass(slots=True)
class _Pace:
    steps: int = 0
    others: int = 0
    """Steps of the other kind by the last of this."""
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    def add(self, seconds: float, tokens: int) -> None:
        self.steps += 1
        self.seconds = _MEMORY * self.seconds + seconds
        self.tokens = _MEMORY * self.tokens + tokens
