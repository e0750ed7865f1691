"""``/v1/completions``: the policy continues raw text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

from tunesmith.learn.endpoint.asks import BadRequest, Fields, Json, TextRequest, parse
from tunesmith.learn.endpoint.chat import CompletionExchange, finish_reason
from tunesmith.learn.endpoint.turns import Event, Policy, TextPiece, TokenText, tokens_of
from tunesmith.learn.environments.conversation import Reply

NUMBERED = "return_tokens_as_token_ids"
"""vLLM's parameter: tokens are named by their numbers, which are unique, unlike their texts."""


class TextExchange(CompletionExchange):
    nothing: ClassVar[Json] = {"text": ""}
    chunk = "text_completion"

    def __init__(self, request: Fields, policy: Policy) -> None:
        """Raises BadRequest."""
        ask = parse(TextRequest, request).as_ask(request)
        super().__init__(ask, request, policy, "cmpl", "text_completion")
        if request.get(NUMBERED):
            if self.streamed:
                raise BadRequest(f"'{NUMBERED}' is of whole answers; leave 'stream' out", "stream")
            self._decode = _numbered
        prompts = [self.ask.prompt(choice) for choice in range(self.ask.choices)]
        shown = self.ask.echo
        self._echoes = [text if shown and isinstance(text, str) else "" for text in prompts]
        self._written = [*map(len, self._echoes)]
        """Characters of the tokens that each choice has streamed."""

    def begin(self) -> Iterator[Event]:
        for index, echo in enumerate(self._echoes):
            if echo:
                yield self._chunk(index, {"text": echo})

    def add(self, piece: TextPiece) -> Iterator[Event]:
        if piece.text or piece.tokens:
            logprobs = None
            if piece.tokens:
                logprobs = _logprobs(piece.tokens, self._written[piece.index])
                self._written[piece.index] += sum(len(one.text) for one in piece.tokens)
            yield self._chunk(piece.index, {"text": piece.text}, logprobs)

    def _choice(self, index: int, reply: Reply) -> Json:
        logprobs = None
        if self.ask.logprobs is not None:
            logprobs = _logprobs(tokens_of(reply, self._decode), len(self._echoes[index]))
        if logprobs and reply.prompt_ids:
            texts = [self._decode([token]) for token in reply.prompt_ids]
            own = [None, *(logprob for logprob, _ in reply.prompt_scores)]
            logprobs["tokens"] = texts + logprobs["tokens"]
            logprobs["token_logprobs"] = own + logprobs["token_logprobs"]
            logprobs["top_logprobs"] = [None, *self._alternatives(reply)] + logprobs["top_logprobs"]
            logprobs["text_offset"] = list(accumulate(map(len, logprobs["tokens"]), initial=0))[:-1]
        return {
            "index": index,
            "text": self._echoes[index] + reply.text,
            "finish_reason": finish_reason(reply),
            "logprobs": logprobs,
        }

    def _alternatives(self, reply: Reply) -> list[Json]:
        return [
            {self._decode([token]): logprob for token, logprob in scores.items()}
            for _, scores in reply.prompt_scores
        ]


def _logprobs(tokens: Sequence[TokenText], start: int) -> Json:
    texts = [token.text for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{**dict(one.likeliest), one.text: one.logprob} for one in tokens],
        "text_offset": list(accumulate(map(len, texts), initial=start))[:-1],
    }


def _numbered(token_ids: Sequence[int]) -> str:
    return " ".join(f"token_id:{token}" for token in token_ids)
