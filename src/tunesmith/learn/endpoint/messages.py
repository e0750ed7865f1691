"""``/v1/messages`` (Anthropic), translated to a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tunesmith.errors import shortened
from tunesmith.learn.endpoint.asks import (
    UNOFFERED,
    BadRequest,
    ChatRequest,
    Fields,
    Json,
    Number,
    Object,
    as_dict,
    parse,
)
from tunesmith.learn.endpoint.turns import Answer, Event, Policy, TextPiece, head_of
from tunesmith.learn.environments.conversation import Reply
from tunesmith.types import Message

PASSED_ON = ("temperature", "top_p", "top_k", "chat_template_kwargs")
"""Parameters that it has in common with a chat request."""
BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "abort": "end_turn"}


class ClientTool(BaseModel):
    """A tool that the client runs; the others would run at Anthropic."""

    name: str
    description: str | None = None
    input_schema: Json


class MessagesRequest(BaseModel):
    messages: Annotated[list[Object], Field(min_length=1)]
    max_tokens: Number | None = None
    system: str | list[Object] | None = None
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    output_config: Object | None = None
    output_format: Object | None = None

    def as_chat(self, request: Fields) -> Json:
        """The equivalent chat request. Raises BadRequest: it has none."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        messages = [one for message in self.messages for one in _chat_messages(message)]
        tools = self.tools or []
        own = [parse(ClientTool, tool) for tool in tools if not _runs_there(tool)]
        functions = [
            {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
            for t in own
        ]
        choice = self.tool_choice or {}
        return {
            **{name: request[name] for name in PASSED_ON if request.get(name) is not None},
            "messages": [*system, *messages],
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            UNOFFERED: [tool["type"] for tool in tools if _runs_there(tool)],
            "tool_choice": _choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "response_format": (self.output_config or {}).get("format") or self.output_format,
        }


class MessagesExchange:
    def __init__(self, request: Fields, policy: Policy) -> None:
        """Raises BadRequest."""
        chat = parse(MessagesRequest, request).as_chat(request)
        self.ask = parse(ChatRequest, chat).as_ask(chat)
        self.streamed = bool(request.get("stream"))
        head = head_of(policy)
        self._message = {
            "id": f"msg_{head.number}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
        }
        self._verbatim = policy.renderer.verbatim
        self._blocks = 0
        """How many blocks were begun."""

    def whole(self, answer: Answer) -> Json:
        reply = answer.replies[0]
        text = reply.message["content"]
        blocks = [{"type": "text", "text": text}] if text else []
        return {
            **self._message,
            "content": [*blocks, *_calls(reply)],
            **self._stop(reply),
            "usage": _usage(answer),
            **answer.said(),
        }

    def begin(self) -> Iterator[Event]:
        begun = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": 0, "output_tokens": 0}  # counted at the end
        yield _event("message_start", message={**self._message, **begun, "usage": usage})

    def add(self, piece: TextPiece) -> Iterator[Event]:
        if piece.text:
            if not self._blocks:
                yield from self._start({"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": piece.text}
            yield _event("content_block_delta", index=0, delta=delta)

    def end(self, answer: Answer) -> Iterator[Event]:
        reply = answer.replies[0]
        if self._blocks:
            yield _event("content_block_stop", index=0)
        for block in _calls(reply):
            index = self._blocks
            yield from self._start({**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        stop = self._stop(reply)
        yield _event("message_delta", delta=stop, usage=_usage(answer), **answer.said())
        yield _event("message_stop")

    def _start(self, block: Json) -> Iterator[Event]:
        index = self._blocks
        self._blocks += 1
        yield _event("content_block_start", index=index, content_block=block)

    def _stop(self, reply: Reply) -> Json:
        """Why the turn ended."""
        written = self._verbatim(reply.completion.token_ids)
        hit = [stop for stop in self.ask.stop if stop in written]
        reason = "stop_sequence" if hit else STOP_REASONS[reply.completion.finish_reason]
        if "tool_calls" in reply.message:
            reason = "tool_use"
        first = min(hit, key=written.index) if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": first}


def _event(kind: str, **fields: object) -> Event:
    return kind, json.dumps({"type": kind, **fields})


def _usage(answer: Answer) -> Json:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.written_tokens}


def _calls(reply: Reply) -> list[Json]:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in reply.message.get("tool_calls", ())
    ]


def _runs_there(tool: Fields) -> bool:
    """Whether a tool is one of Anthropic's own, such as ``web_search_20250305``."""
    return "input_schema" not in tool and tool.get("type", "custom") != "custom"


def _choice(choice: Fields) -> object:
    match choice.get("type", "auto"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            valid = "auto, any, tool, none"
            why = f"'tool_choice.type' = {kind!r} is not served; valid: {valid}"
            raise BadRequest(why, "tool_choice")


def _chat_messages(message: Json) -> Iterator[Message]:
    """A message as chat messages: each tool's result is one, and the rest is another."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        why = f"'role' = {role!r} is not served; valid: user, assistant, system"
        raise BadRequest(why, "messages")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    rest: list[Json] = []
    calls: list[Json] = []
    for raw in content:
        block: Any = as_dict(raw)
        kind = block.get("type") if isinstance(block, Mapping) else None
        match kind:
            case "text" | "image":
                rest.append(_part(block))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                answer = {"tool_call_id": block.get("tool_use_id")}
                yield {"role": "tool", **answer, "content": _parts(block.get("content") or "")}
            case "thinking" | "redacted_thinking":
                continue  # this policy's thinking is text
            case _:
                why = f"'{kind}' blocks are not served; valid: {', '.join(BLOCKS)}"
                raise BadRequest(why, "messages")
    if rest or calls:
        yield {"role": role, "content": rest, **({"tool_calls": calls} if calls else {})}


def _part(block: Fields) -> Json:
    """A text or an image as a part of a chat message."""
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source")
    fields: Json = source if isinstance(source, dict) else {}
    url = fields.get("url")
    if fields.get("type") == "base64":
        url = f"data:{fields.get('media_type')};base64,{fields.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _parts(content: object) -> object:
    """The content of a tool's result as that of a chat message."""
    blocks = [as_dict(block) for block in content] if isinstance(content, list) else []
    if any(isinstance(block, Mapping) and block.get("type") == "image" for block in blocks):
        return [_part(block) for block in blocks]
    return _text(content)


def _text(content: object) -> str:
    """Text, or the text of a list of blocks. Raises BadRequest: it has others."""
    if isinstance(content, str):
        return content
    blocks: list[Any] = content if isinstance(content, list) else [content]
    parts = [as_dict(block) for block in blocks]
    kinds = [part.get("type") if isinstance(part, Mapping) else part for part in parts]
    if others := ", ".join(str(kind) for kind in kinds if kind != "text"):
        raise BadRequest(f"'{shortened(others)}' blocks are not served here; valid: text")
    texts = [part.get("text") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
