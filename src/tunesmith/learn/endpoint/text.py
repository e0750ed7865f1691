"""``/v1/completions``: the policy continues raw text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

from tunesmith.learn.endpoint.asks import BadRequest, Fields, Json, TextRequest, parse
from tunesmith.learn.endpoint.chat import CompletionExchange, finish_reason
from tunesmith.learn.endpoint.turns import Answer, Event, Policy, TextPiece, TokenText, tokens_of
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
        self._written = [0] * self.ask.choices
        """Characters of the tokens that each choice has streamed."""

    def begin(self) -> Iterator[Event]:
        for index, echo in enumerate(self._echoes):
            if echo:
                yield self._chunk(index, {"text": echo})

    def add(self, piece: TextPiece) -> Iterator[Event]:
        tokens = () if self.ask.echo else piece.tokens  # those of the prompt come before them
        if piece.text or tokens:
            logprobs = None
            if tokens:
                logprobs = _logprobs(tokens, self._written[piece.index])
                self._written[piece.index] += sum(len(one.text) for one in tokens)
            yield self._chunk(piece.index, {"text": piece.text}, logprobs)

    def end(self, answer: Answer) -> Iterator[Event]:
        if self.ask.echo and self.ask.logprobs is not None:
            for index, reply in enumerate(answer.replies):
                yield self._chunk(index, self.nothing, self._scored(index, reply))
        yield from super().end(answer)

    def _choice(self, index: int, reply: Reply) -> Json:
        return {
            "index": index,
            "text": self._echoes[index] + reply.text,
            "finish_reason": finish_reason(reply),
            "logprobs": None if self.ask.logprobs is None else self._scored(index, reply),
        }

    def _scored(self, index: int, reply: Reply) -> Json:
        """The log-probabilities of a choice, with those of its prompt if they are known."""
        logprobs = _logprobs(tokens_of(reply, self._decode), len(self._echoes[index]))
        if reply.prompt_ids:
            texts = [self._decode([token]) for token in reply.prompt_ids]
            own = [None, *(logprob for logprob, _ in reply.prompt_scores)]
            logprobs["tokens"] = texts + logprobs["tokens"]
            logprobs["token_logprobs"] = own + logprobs["token_logprobs"]
            logprobs["top_logprobs"] = [None, *self._alternatives(reply)] + logprobs["top_logprobs"]
            logprobs["text_offset"] = list(accumulate(map(len, logprobs["tokens"]), initial=0))[:-1]
        return logprobs

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
