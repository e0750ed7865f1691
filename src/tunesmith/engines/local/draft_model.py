"""Drafts by a smaller model, which keeps its own keys and values in rows arranged as the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from tunesmith.engines.local.prefill_attention import Piece
from tunesmith.engines.local.requests import Request
from tunesmith.engines.local.runner import Runner

LARGEST_LAG = 16
"""Own tokens of a request that the draft model may have missed, while nothing was drafted, and still catches up."""


class DraftModel:
    """Draws each proposal with the number the request's own token will be drawn with, so like models draw alike."""

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
            drawn, _ = self._runner.draw(last, requests, [len(r.token_ids) + step for r in requests])
            for i, token in zip(drawing, drawn, strict=True):
                lengths[i] += len(tokens[i])
                tokens[i] = [token]
                drafts[i].append(token)
        for request, draft in zip(running, drafts, strict=True):
            if draft:
                request.draft_cached, request.draft = len(request.token_ids), draft
        return drafts

    def finished(self, requests: Iterable[Request]) -> None:
        """See ``Drafter``."""


def _keep_what_came_true(request: Request) -> None:
    """Of the proposals in the bank those that the request then wrote; the last was never read."""
    for guess in request.draft[:-1]:
        if request.draft_cached >= len(request.token_ids) - 1 or request.token_ids[request.draft_cached] != guess:
            break
        request.draft_cached += 1
    request.draft = []
