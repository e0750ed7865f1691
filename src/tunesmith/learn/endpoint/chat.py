"""``/v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from tunesmith.learn.endpoint.asks import ChatRequest, Fields, Json, parse
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


class ChatExchange:
    def __init__(self, request: Fields, policy: Policy) -> None:
        """Raises BadRequest."""
        self.ask = parse(ChatRequest, request).as_ask(request)
        self.streamed = bool(request.get("stream"))
        self._head = answer_head("chatcmpl", "chat.completion", policy)
        self._usage = wants_usage(request)
        self._decode = policy.renderer.verbatim

    def whole(self, answer: Answer) -> Json:
        choices = [self._choice(index, reply) for index, reply in enumerate(answer.replies)]
        return {**self._head, "choices": choices, "usage": usage(answer), **answer.said()}

    def begin(self) -> Iterator[Event]:
        for index in range(self.ask.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def add(self, piece: TextPiece) -> Iterator[Event]:
        if piece.text or piece.tokens:
            logprobs = self._logprobs(piece.tokens) if piece.tokens else None
            yield self._chunk(piece.index, {"content": piece.text}, logprobs)

    def end(self, answer: Answer) -> Iterator[Event]:
        for index, reply in enumerate(answer.replies):
            calls = reply.message.get("tool_calls", ())
            for place, call in enumerate(calls):
                yield self._chunk(index, {"tool_calls": [{"index": place, **call}]})
            last = index == len(answer.replies) - 1
            said = answer.said() if last else {}
            yield self._chunk(index, {}, finish_reason=finish_reason(reply), **said)
        if self._usage:
            yield self._event({"choices": [], "usage": usage(answer)})
        yield DONE

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

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        **said: object,
    ) -> Event:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._event({"choices": [choice], **said})

    def _event(self, fields: Json) -> Event:
        return None, json.dumps({**self._head, "object": "chat.completion.chunk", **fields})


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
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


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
