"""``/v1/chat/completions``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from tunesmith.learn.endpoint.asks import Ask, ChatRequest, Fields, Json, parse
from tunesmith.learn.endpoint.turns import (
    Answer,
    Event,
    Policy,
    TextPiece,
    TokenText,
    head_of,
    tokens_of,
)
from tunesmith.learn.environments.conversation import Reply

DONE: Event = (None, "[DONE]")


class CompletionExchange(ABC):
    """What the interfaces of completions, of messages and of text, have in common."""

    nothing: ClassVar[Json]
    """A chunk without text."""
    chunk: ClassVar[str]
    """What a chunk is called."""

    def __init__(self, ask: Ask, request: Fields, policy: Policy, prefix: str, kind: str) -> None:
        self.ask = ask
        self.streamed = bool(request.get("stream"))
        self._head = answer_head(prefix, kind, policy)
        self._usage = wants_usage(request)
        self._decode = policy.renderer.verbatim

    def whole(self, answer: Answer) -> Json:
        choices = [self._choice(index, reply) for index, reply in enumerate(answer.replies)]
        return {**self._head, "choices": choices, "usage": usage(answer), **answer.said()}

    def end(self, answer: Answer) -> Iterator[Event]:
        for index, reply in enumerate(answer.replies):
            yield from self._calls(index, reply)
            said = answer.said() if index == len(answer.replies) - 1 else {}
            yield self._chunk(index, self.nothing, finish_reason=finish_reason(reply), **said)
        if self._usage:
            yield self._event({"choices": [], "usage": usage(answer)})
        yield DONE

    @abstractmethod
    def _choice(self, index: int, reply: Reply) -> Json:
        """A choice of a whole answer."""

    def _calls(self, index: int, reply: Reply) -> Iterator[Event]:
        """The tool calls of a reply: text has none."""
        del index, reply
        yield from ()

    def _chunk(
        self,
        index: int,
        new: Json,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        **said: object,
    ) -> Event:
        choice = {"index": index, **new, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event({"choices": [choice], **said})

    def _event(self, fields: Json) -> Event:
        return None, json.dumps({**self._head, "object": self.chunk, **fields})


class ChatExchange(CompletionExchange):
    nothing: ClassVar[Json] = {"delta": {}}
    chunk = "chat.completion.chunk"

    def __init__(self, request: Fields, policy: Policy) -> None:
        """Raises BadRequest."""
        ask = parse(ChatRequest, request).as_ask(request)
        super().__init__(ask, request, policy, "chatcmpl", "chat.completion")

    def begin(self) -> Iterator[Event]:
        for index in range(self.ask.n):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def add(self, piece: TextPiece) -> Iterator[Event]:
        if piece.text or piece.tokens:
            logprobs = self._logprobs(piece.tokens) if piece.tokens else None
            yield self._chunk(piece.index, {"delta": {"content": piece.text}}, logprobs)

    def _calls(self, index: int, reply: Reply) -> Iterator[Event]:
        for place, call in enumerate(reply.message.get("tool_calls", ())):
            yield self._chunk(index, {"delta": {"tool_calls": [{"index": place, **call}]}})

    def _choice(self, index: int, reply: Reply) -> Json:
        message = {"content": None, "refusal": None, "tool_calls": None, **reply.message}
        wanted = self.ask.logprobs is not None
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens_of(reply, self._decode)) if wanted else None,
            "finish_reason": finish_reason(reply),
        }

    def _logprobs(self, tokens: Sequence[TokenText]) -> Json:
        return {"content": token_entries(tokens), "refusal": None}


def answer_head(prefix: str, kind: str, policy: Policy) -> Json:
    head = head_of(policy)
    return {
        "id": f"{prefix}-{head.number}",
        "object": kind,
        "created": head.created,
        "model": head.model,
    }


def wants_usage(request: Fields) -> bool:
    options = request.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def usage(answer: Answer) -> Json:
    prompt = answer.prompt_tokens
    written = answer.written_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def token_entries(tokens: Sequence[TokenText]) -> list[Json]:
    """Where alternatives to a token are unknown, ``top_logprobs`` holds the token alone."""
    content: list[Json] = []
    for token in tokens:
        entry = _entry(token.text, token.logprob)
        ranked = [_entry(*each) for each in token.likeliest]
        content.append({**entry, "top_logprobs": ranked or [entry]})
    return content


def _entry(text: str, logprob: float) -> Json:
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": raw}


def finish_reason(reply: Reply) -> str:
    if "tool_calls" in reply.message:
        return "tool_calls"
    return "length" if reply.completion.finish_reason == "length" else "stop"
