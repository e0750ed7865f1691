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

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from tunesmith.engines.local.prefill_attention import Piece
from tunesmith.engines.local.requests import Request
from tunesmith.engines.local.runner import Runner
from tunesmith.errors import UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.rope import LengthRule

TRIAL = 12
"""Decode steps of either kind before they are compared."""
RETRY = 64
"""Decode steps between two of the slower kind, so that it is noticed when that changes."""
_MEMORY = 0.9
"""Share of what was measured that counts after one more step."""
LENGTHS = (4, 3, 2)
"""Of the n-grams that are looked up, longest first."""
KEPT_TOKENS = 100_000
"""Of finished completions, over all prompts; the prompts unused for longest are forgotten first."""
LARGEST_LAG = 16
"""Own tokens of a request that the draft model may have missed, while nothing was drafted, and still catches up."""


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
        if self.draft.lengths not in (None, model.lengths):
            raise UserError(
                "the draft model (system.draft_model) has rotary frequencies that depend on the length of a sequence "
                "(longrope, dynamic), and change at other lengths than the model's: use another one, or "
                'system.speculative = "ngram"'
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

    def finished(self, requests: Iterable[Request]) -> None:
        """These ended."""


class Continuations:
    """A text, and where in it each n-gram was last followed by a token.

    Example:
        >>> text = Continuations()
        >>> text.extend([1, 2, 3, 1, 2])
        >>> text.after([1, 2], 3)
        [3, 1, 2]
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._start = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def begin(self) -> None:
        """What comes now does not follow what came before."""
        self._start = len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = len(self._tokens)
            for n in LENGTHS:
                if place - n >= self._start:
                    self._places[tuple(self._tokens[place - n :])] = place
            self._tokens.append(token)

    def after(self, gram: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the n-gram last time; empty where nothing did."""
        place = self._places.get(tuple(gram))
        return [] if place is None else self._tokens[place : place + count]


class NgramDrafter(Drafter):
    """Proposes the continuation of the longest n-gram that it has seen; a wrong guess costs time only."""

    def __init__(self) -> None:
        self._running: dict[Request, Continuations] = {}
        self._finished: OrderedDict[tuple[int, ...], Continuations] = OrderedDict()
        self._kept = 0

    def propose(self, running: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See ``Drafter``."""
        return [self._guess(r, n) if n > 0 else [] for r, n in zip(running, most, strict=True)]

    def finished(self, requests: Iterable[Request]) -> None:
        """See ``Drafter``."""
        for request in requests:
            self._running.pop(request, None)
            shared = self._shared(request.prompt_ids)
            before = len(shared)
            shared.begin()
            shared.extend([*request.prompt_ids[-LENGTHS[0] :], *request.token_ids])
            self._kept += len(shared) - before
        while self._kept > KEPT_TOKENS and len(self._finished) > 1:
            _, forgotten = self._finished.popitem(last=False)
            self._kept -= len(forgotten)

    def _guess(self, request: Request, count: int) -> list[int]:
        own = self._running.setdefault(request, Continuations())
        own.extend(request.token_ids[len(own) :])
        texts = own, self._shared(request.prompt_ids)
        tail = [*request.prompt_ids[-LENGTHS[0] :], *request.token_ids[-LENGTHS[0] :]]
        draft: list[int] = []
        while len(draft) < count:
            # Where text goes in circles, the newest place has little behind it; the draft itself leads on.
            after = tail + draft
            found = (text.after(after[-n:], count - len(draft)) for n in LENGTHS for text in texts)
            more = next(filter(None, found), None)
            if more is None:
                break
            draft += more
        return draft

    def _shared(self, prompt_ids: tuple[int, ...]) -> Continuations:
        """The prompt, and behind it the completions that ended."""
        if prompt_ids not in self._finished:
            self._finished[prompt_ids] = Continuations()
            self._finished[prompt_ids].extend(prompt_ids)
            self._kept += len(prompt_ids)
        self._finished.move_to_end(prompt_ids)
        return self._finished[prompt_ids]


class DraftModel(Drafter):
    """A smaller model, which keeps its own keys and values in rows arranged as the engine's.

    It draws each proposal with the number the request's own token will be drawn with, so like models draw
    alike.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Read what the engine's prefill read."""
        for owner, _ in self._runner.fill(pieces):
            if isinstance(owner, Request):
                owner.draft_cached, owner.draft = owner.cached, []

    def propose(self, running: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See ``Drafter``."""
        for request in running:
            _keep_what_came_true(request)
        fresh = [r.token_ids[r.draft_cached :] for r in running]
        most = [n if len(new) <= LARGEST_LAG else 0 for new, n in zip(fresh, most, strict=True)]
        lengths = [r.draft_cached for r in running]
        tokens = [new if n > 0 else [] for new, n in zip(fresh, most, strict=True)]
        drafts: list[list[int]] = [[] for _ in running]
        for step in range(max(most)):
            drawing = [i for i, n in enumerate(most) if n > step]
            hidden = self._runner.decode(running, lengths, [tokens[i] if n > step else [] for i, n in enumerate(most)])
            ends = list(accumulate(len(tokens[i]) for i in drawing))
            last = hidden.index_select(0, torch.tensor(ends, device=hidden.device) - 1)
            requests = [running[i] for i in drawing]
            drawn, _ = self._runner.draw(last, requests, [drafts[i] for i in drawing])
            for i, token in zip(drawing, drawn, strict=True):
                lengths[i] += len(tokens[i])
                tokens[i] = [token]
                drafts[i].append(token)
        for request, draft in zip(running, drafts, strict=True):
            if draft:
                request.draft_cached, request.draft = len(request.token_ids), draft
        return drafts


def _keep_what_came_true(request: Request) -> None:
    """Of the proposals in the bank those that the request then wrote; the last was never read."""
    for guess in request.draft[:-1]:
        if request.draft_cached >= len(request.token_ids) - 1 or request.token_ids[request.draft_cached] != guess:
            break
        request.draft_cached += 1
    request.draft = []


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


class Speculator:
    """What the engine asks: a drafter, and whether to use it."""

    def __init__(self, drafter: Drafter, speculation: Speculation, lengths: LengthRule | None = None) -> None:
        self.drafter, self._lengths = drafter, lengths
        self._tokens, self._report = speculation.tokens, speculation.report
        self._switch = Switch()
        self._tried = False

    def propose(self, running: Sequence[Request], capacity: int) -> list[list[int]]:
        """For each request tokens that it may write next, within its length and its row's ``capacity``."""
        self._tried = self._switch.on(len(running))
        if not self._tried:
            return [[] for _ in running]
        most = [min(self._tokens, min(r.kv_length, capacity) - r.cached - 1, self._rotated_alike(r)) for r in running]
        return self.drafter.propose(running, most)

    def _rotated_alike(self, request: Request) -> int:
        """Tokens that the request may grow by before its keys have to be computed anew."""
        rule, now = self._lengths, request.length
        if rule is None:
            return self._tokens
        return next((n for n in range(self._tokens) if rule.alike(now + n + 1) != rule.alike(now)), self._tokens)

    def measured(self, rows: int, seconds: float, tokens: int) -> None:
        """How long the step took that these were proposed for, and what was written."""
        self._switch.measured(rows, self._tried, seconds, tokens)

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
