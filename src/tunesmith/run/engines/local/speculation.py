"""Speculative decoding: a smaller model guesses several tokens, and the model checks them in one
pass.

The model samples its own token at each position, with the random number that plain decoding would
use there (``Uniforms``), up to the first that differs from the guess. The tokens are therefore
those of plain decoding: for a deterministic guess this is the rejection sampling of Leviathan et
al. 2023 (arXiv:2211.17192), with a point mass as the proposal. The assistant samples with the same
random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from tunesmith.errors import UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.decoding import KVSpan
from tunesmith.run.engines.local.pool import KVPool
from tunesmith.run.engines.local.requests import LocalRequest, Piece, StepBatch
from tunesmith.run.engines.local.runner import Runner, text_config
from tunesmith.types import FinishReason

MOST_ROWS = 16
MOST_ROWS_ON_CPU = 1
"""With more requests, the cost of a pass grows with its tokens, and guesses gain nothing."""


class Speculation:
    """Decode steps with guesses of an assistant, whose keys and values are in the same blocks of
    the pool as the model's.

    Models with the same tokenizer may pad the vocabulary differently: a token that the assistant
    lacks is its last one.
    """

    def __init__(self, model: Runner, assistant: Runner, pool: KVPool, tokens: int) -> None:
        self._model = model
        self._assistant = assistant
        self._pool = pool
        self._tokens = tokens
        on_cpu = model.model.device.type == "cpu"
        self._most_rows = MOST_ROWS_ON_CPU if on_cpu else MOST_ROWS
        self._read: WeakKeyDictionary[KVSpan, int] = WeakKeyDictionary()
        """The tokens of each span that the assistant has read."""

    def room(self, requests: Sequence[LocalRequest]) -> int:
        """Tokens to guess: within all length limits and the pool, and before keys have to be
        computed again."""
        if len(requests) > self._most_rows:
            return 0
        tokens = min(self._tokens, *(r.kv_length - r.cached - 1 for r in requests))
        rule = self._model.model.lengths
        if rule and any(rule.alike(r.length + tokens) != r.rotary_length for r in requests):
            return 0
        fits = all(self._pool.append(r.span, r.cached + 1 + tokens) for r in requests)
        return tokens if fits else 0

    def step(self, batch: StepBatch, tokens: int, version: int) -> dict[LocalRequest, FinishReason]:
        """Guess ``tokens`` of each request, and append what the model samples; returns the requests
        that ended, and why."""
        requests = batch.requests
        guesses = self._guess(requests, tokens)
        batch.drafted = tokens * len(requests)
        pieces = [
            Piece(r, r.cached, [r.token_ids[-1], *guess])
            for r, guess in zip(requests, guesses, strict=True)
        ]
        logits = self._model.logits(self._model.read(pieces))
        logits = logits.view(len(requests), tokens + 1, -1)
        ended: dict[LocalRequest, FinishReason] = {}
        rows = list(range(len(requests)))
        for at in range(tokens + 1):
            sampling = [requests[row] for row in rows]
            drawn, logprobs = self._model.draw(logits[rows, at], sampling)
            ended |= batch.append(sampling, drawn, logprobs, version)
            rows = [
                row
                for row, token in zip(rows, drawn, strict=True)
                if [token] == guesses[row][at : at + 1] and requests[row] not in ended
            ]
            if not rows:
                break
        for request in requests:
            self._read[request.span] = min(self._read[request.span], request.cached)
        return ended

    def _guess(self, requests: Sequence[LocalRequest], tokens: int) -> list[list[int]]:
        prompts = dict.fromkeys(r.prompt for r in requests if r.prompt)
        new = [prompt for prompt in prompts if prompt.span not in self._read]
        for _ in self._assistant.fill([Piece(p, 0, self._known(p.token_ids)) for p in new]):
            pass
        self._read.update((prompt.span, len(prompt)) for prompt in new)
        guesses: list[list[int]] = [[] for _ in requests]
        for _ in range(tokens):
            pieces: list[Piece] = []
            numbers: list[float] = []
            for request, guess in zip(requests, guesses, strict=True):
                text = [*request.token_ids, *guess]
                read = self._read.get(request.span, 0)
                pieces.append(Piece(request, read, self._known(text[read:])))
                numbers.append(request.uniforms[len(text)])
                self._read[request.span] = len(text)
            ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
            hidden = self._assistant.read(pieces)
            logits = self._assistant.logits(hidden[ends.to(hidden.device)])
            logits = logits[:, : self._model.model.head.out_features]
            drawn, _ = self._assistant.sample(logits, requests, numbers)
            for guess, token in zip(guesses, drawn, strict=True):
                guess.append(token)
        return guesses

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        last = self._assistant.model.head.out_features - 1
        return [min(token, last) for token in token_ids]


def check_assistant(assistant: CausalLM, model: CausalLM, tokens: int) -> None:
    """Refuse an assistant that does not fit the model.

    Raises:
        UserError: ``tokens`` is below 1, or the assistant has a different vocabulary or a shorter
            context.
    """
    if tokens < 1:
        raise UserError(f"speculative_tokens = {tokens} guesses nothing: use at least 1")
    problem = None
    reads, needed = (text_config(each).max_position_embeddings for each in (assistant, model))
    if assistant.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        problem = "has a different vocabulary from the model"
    elif assistant.lengths not in (None, model.lengths):
        problem = "changes its rotary frequencies at other lengths (longrope, dynamic)"
    elif reads < needed:
        problem = f"reads at most {reads} tokens, but the model {needed}"
    if problem:
        raise UserError(
            f"the draft model (system.draft_model) {problem}: use a smaller model of the same "
            "family",
            keys=("system.draft_model",),
        )
