"""Drafts by look-up: what followed the last few tokens before, in this completion or in earlier ones of its prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tunesmith.engines.local.prefill_attention import Piece
from tunesmith.engines.local.requests import Request

LENGTHS = (4, 3, 2)
"""Of the n-grams that are looked up, longest first."""
KEPT_TOKENS = 100_000
"""Of finished completions, over all prompts; the prompts unused for longest are forgotten first."""


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


class NgramDrafter:
    """Proposes the continuation of the longest n-gram that it has seen; a wrong guess costs time only."""

    def __init__(self) -> None:
        self._running: dict[Request, Continuations] = {}
        self._finished: OrderedDict[tuple[int, ...], Continuations] = OrderedDict()
        self._kept = 0

    def propose(self, running: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See ``Drafter``."""
        return [self._guess(r, n) if n > 0 else [] for r, n in zip(running, most, strict=True)]

    def fill(self, pieces: Sequence[Piece]) -> None:
        """See ``Drafter``."""

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
