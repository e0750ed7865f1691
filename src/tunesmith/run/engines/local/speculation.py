"""Speculative decoding: several tokens of a request in one pass, if a cheap draft of them was
right.

The model reads the draft tokens in one pass and samples its own token at each of their positions,
with the random number that plain decoding would use there (``Uniforms``). The draft is kept up to
the first token that differs from the sampled one. The tokens are therefore those of plain decoding:
for a deterministic draft this is the rejection sampling of Leviathan et al. 2023
(arXiv:2211.17192), with a point mass as the proposal. An assistant samples with the same random
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tunesmith.errors import UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.rope import LengthRule
from tunesmith.run.engines.local.requests import LocalRequest, Piece
from tunesmith.run.engines.local.runner import Runner

MOST_ROWS = 16
MOST_ROWS_ON_CPU = 1
"""With more requests, the cost of a pass grows with its tokens, and drafts gain nothing."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are drafted."""

    assistant: CausalLM
    """A smaller model that drafts."""
    tokens: int
    """Limit of draft tokens per request and step."""

    @property
    def at_once(self) -> int:
        """With more requests decoded at once, nothing is drafted."""
        return MOST_ROWS_ON_CPU if self.assistant.device.type == "cpu" else MOST_ROWS

    def most(self, request: LocalRequest, capacity: int, lengths: LengthRule | None) -> int:
        """Tokens to draft for a request: within its length limit and its row's ``capacity``, and
        before its keys have to be recomputed; not positive: none."""
        room = min(self.tokens, min(request.kv_length, capacity) - request.cached - 1)
        if lengths is None:
            return room
        now = lengths.alike(request.length)
        return next((n for n in range(room) if lengths.alike(request.length + n + 1) != now), room)

    def check(self, model: CausalLM) -> None:
        """Refuse an assistant that does not fit the model.

        Raises:
            UserError: ``tokens`` is below 1, or the assistant has a different vocabulary or a
                shorter context.
        """
        if self.tokens < 1:
            raise UserError(f"speculative_tokens = {self.tokens} guesses nothing: use at least 1")
        problem = None
        reads, needed = (
            lm.module.config.get_text_config().max_position_embeddings
            for lm in (self.assistant, model)
        )
        if self.assistant.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            problem = "has a different vocabulary from the model"
        elif self.assistant.lengths not in (None, model.lengths):
            problem = (
                "changes its rotary frequencies at other lengths than the model (longrope, dynamic)"
            )
        elif reads < needed:
            problem = f"reads at most {reads} tokens, but the model {needed}"
        if problem:
            raise UserError(
                f"the draft model (system.draft_model) {problem}: use a smaller model of the same family",
                keys=("system.draft_model",),
            )


class Drafter:
    """A smaller model, whose keys and values are in the same rows of the pool as the model's.

    Models with the same tokenizer may pad the vocabulary differently: it drafts nothing after a
    token that it lacks.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._reads = runner.model.head.out_features

    def propose(self, running: Sequence[LocalRequest], most: Sequence[int]) -> list[list[int]]:
        """Draft the next tokens of each request: at most ``most[i]`` (none if that is not
        positive), with the random numbers that the request's own tokens will use."""
        drafts: list[list[int]] = [[] for _ in running]
        most = [n if self._can_read(r) else 0 for r, n in zip(running, most, strict=True)]
        read = [r.prompt for r, n in zip(running, most, strict=True) if n > 0]
        new = {prompt: None for prompt in read if prompt and not prompt.assistant_ready}
        for prompt, _ in self._runner.fill([Piece(prompt, 0, prompt.token_ids) for prompt in new]):
            assert not isinstance(prompt, LocalRequest)
            prompt.assistant_ready = True
        for step in range(max(most)):
            rows = [i for i, n in enumerate(most) if n > step]
            requests = [running[i] for i in rows]
            # The first pass reads the tokens generated since the last draft, later passes the
            # previous draft token.
            starts = [
                r.assistant_cached if step == 0 else len(r.token_ids) + step - 1 for r in requests
            ]
            texts = [[*r.token_ids, *drafts[i]] for i, r in zip(rows, requests, strict=True)]
            pieces = [
                Piece(r, start, text[start:])
                for r, start, text in zip(requests, starts, texts, strict=True)
            ]
            ends = torch.tensor(list(accumulate(map(len, pieces)))) - 1
            hidden = self._runner.read(pieces)
            drawn, _ = self._runner.draw(
                hidden[ends.to(hidden.device)], requests, [drafts[i] for i in rows]
            )
            for i, request, token in zip(rows, requests, drawn, strict=True):
                drafts[i].append(token)
                request.assistant_cached = len(request.token_ids)
        return drafts

    def _can_read(self, request: LocalRequest) -> bool:
        """Whether its vocabulary has all tokens that it has yet to read."""
        prompt = (
            request.prompt_ids
            if request.prompt is None or not request.prompt.assistant_ready
            else ()
        )
        return (
            max((*prompt, *request.token_ids[request.assistant_cached :]), default=0) < self._reads
        )
