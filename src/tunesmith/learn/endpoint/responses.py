"""``/v1/responses``, translated to a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator

from tunesmith.learn.endpoint.asks import (
    UNOFFERED,
    BadRequest,
    ChatRequest,
    Fields,
    Json,
    Object,
    as_dict,
    parse,
)
from tunesmith.learn.endpoint.chat import token_entries
from tunesmith.learn.endpoint.turns import Answer, Event, Policy, TextPiece, head_of, tokens_of
from tunesmith.learn.environments.conversation import Reply
from tunesmith.types import Message, as_messages

PASSED_ON = (
    "temperature", "top_p", "tool_choice", "parallel_tool_calls", "stop", "seed",
    "chat_template_kwargs", "top_logprobs",
)  # fmt: skip
"""Parameters that a ``responses`` request has in common with a chat request."""
LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log-probabilities."""
NAMESPACE = "namespace"
KINDS = ("function", NAMESPACE)
"""Kinds of tools that the client runs; tools of other kinds run at OpenAI, or have a grammar."""
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
KEPT = 1000
"""Responses that can be continued, the newest of a policy."""


class FunctionTool(BaseModel):
    """A tool of a ``responses`` request."""

    name: str
    description: str | None = None
    parameters: Json | None = None


class ResponseRequest(BaseModel):
    input: Annotated[list[Object], BeforeValidator(as_messages)] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Object] | None = None
    text: Json | None = None
    reasoning: Json | None = None
    include: list[Any] | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None

    def as_chat(self, request: Fields, messages: Sequence[Message]) -> Json:
        """The equivalent chat request with these messages, after ``instructions`` as a system
        message."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        functions = [function for _, function in self.functions()]
        others = [tool.get("type") for tool in self.tools or () if tool.get("type") not in KINDS]
        text = self.text or {}
        return {
            **{name: request[name] for name in PASSED_ON if request.get(name) is not None},
            "messages": [*system, *messages],
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            UNOFFERED: others,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": text.get("format"),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "logprobs": LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
        }

    def functions(self) -> Iterator[tuple[str | None, Json]]:
        """The tools that the client runs, each with its namespace. Raises BadRequest."""
        for tool in self.tools or ():
            inner = tool.get("tools") if tool.get("type") == NAMESPACE else [tool]
            for one in inner if isinstance(inner, list) else ():
                if isinstance(one, Mapping) and one.get("type") == "function":
                    space = tool.get("name") if one is not tool else None
                    yield space, parse(FunctionTool, one).model_dump(exclude_none=True)


class ResponseExchange:
    def __init__(self, request: Fields, policy: Policy) -> None:
        """Raises BadRequest: also where ``previous_response_id`` is unknown."""
        parsed = parse(ResponseRequest, request)
        if request.get("prompt") is not None:
            why = "'prompt' is a template that its provider has; send 'input' instead"
            raise BadRequest(why, "prompt")
        previous = parsed.previous_response_id
        if previous is not None and previous not in policy.responses:
            unknown = f"'previous_response_id' = {previous!r}"
            why = f"{unknown} is not a response of this {policy.what}"
            raise BadRequest(why, "previous_response_id")
        earlier = policy.responses[previous] if previous is not None else []
        self._messages = [*earlier, *messages_of(parsed.input)]
        chat = parsed.as_chat(request, self._messages)
        self.ask = parse(ChatRequest, chat).as_ask(chat)
        self.streamed = bool(request.get("stream"))
        self._request = request
        self._spaces = {function["name"]: space for space, function in parsed.functions() if space}
        """The namespaces of tools that are in one."""
        self._head = head_of(policy)
        self._decode = policy.renderer.verbatim
        self._responses = policy.responses
        self._events = 0
        self._text = ""
        """The text that was streamed so far."""
        self._logprobs: list[Json] = []
        self._is_open = False
        """Whether a message was begun."""

    def whole(self, answer: Answer) -> Json:
        reply = answer.replies[0]
        is_cut = reply.completion.finish_reason == "length" and not reply.calls
        status = "incomplete" if is_cut else "completed"
        response: Json = {
            **self._response(status),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(reply, status),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.written_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.written_tokens,
            },
            **answer.said(),
        }
        if self._request.get("store") is not False:
            self._responses[response["id"]] = [*self._messages, *messages_of(response["output"])]
            if len(self._responses) > KEPT:
                del self._responses[next(iter(self._responses))]
        return response

    def begin(self) -> Iterator[Event]:
        begun = {**self._response("in_progress"), "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=begun)

    def add(self, piece: TextPiece) -> Iterator[Event]:
        if piece.text or piece.tokens:
            if not self._is_open:
                yield from self._open()
            logprobs = token_entries(piece.tokens)
            self._text += piece.text
            self._logprobs += logprobs
            yield self._event(
                "response.output_text.delta", **self._place, delta=piece.text, logprobs=logprobs
            )

    def end(self, answer: Answer) -> Iterator[Event]:
        response = self.whole(answer)
        if response["output"][0]["type"] == "message":
            if not self._is_open:
                yield from self._open()
            yield from self._close(response["output"][0])
        elif self._is_open:  # it has only tokens whose text is a call
            yield from self._close(self._item("completed"))
            response["output"].insert(0, self._item("completed"))
        for index, item in enumerate(response["output"]):
            if item["type"] == "function_call":
                yield from self._call_events(index, item)
        is_cut = response["status"] == "incomplete"
        yield self._event(f"response.{'incomplete' if is_cut else 'completed'}", response=response)

    @property
    def _place(self) -> Json:
        return {"output_index": 0, "item_id": f"msg_{self._head.number}", "content_index": 0}

    def _open(self) -> Iterator[Event]:
        self._is_open = True
        bare = {**self._item("in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=bare)
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place, part=empty)

    def _close(self, item: Json) -> Iterator[Event]:
        (part,) = item["content"]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("response.output_text.done", **self._place, **done)
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call_events(self, index: int, item: Json) -> Iterator[Event]:
        bare = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=index, item=bare)
        place = {"output_index": index, "item_id": item["id"]}
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", **place, delta=item["arguments"])
        whole = {"arguments": item["arguments"], "name": item["name"]}
        yield self._event(f"{kind}.done", **place, **whole)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: object) -> Event:
        number = self._events
        self._events += 1
        return kind, json.dumps({"type": kind, **fields, "sequence_number": number})

    def _response(self, status: str) -> Json:
        request = self._request
        return {
            "id": f"resp_{self._head.number}",
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.get("instructions"),
            "metadata": request.get("metadata") or {},
            "model": self._head.model,
            "parallel_tool_calls": self.ask.parallel,
            "previous_response_id": request.get("previous_response_id"),
            "temperature": None,
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": list(request.get("tools") or ()),
            "top_p": None,
        }

    def _output(self, reply: Reply, status: str) -> list[Json]:
        """The items of a response: a message, unless it is empty next to calls, and the function
        calls."""
        calls: list[Json] = reply.message.get("tool_calls", [])
        items: list[Json] = []
        if reply.message["content"] or not calls:
            wanted = self.ask.logprobs is not None
            logprobs = token_entries(tokens_of(reply, self._decode)) if wanted else []
            items.append(self._item(status, reply.message["content"], logprobs))
        for index, call in enumerate(calls):
            name = f"fc_{self._head.number}_{index}"
            head = {"id": name, "type": "function_call", "status": "completed"}
            space = self._spaces.get(call["function"]["name"])
            within = {"namespace": space} if space else {}
            items.append({**head, "call_id": call["id"], **call["function"], **within})
        return items

    def _item(
        self, status: str, text: str | None = None, logprobs: list[Json] | None = None
    ) -> Json:
        """A message; without text, what was streamed."""
        part = {
            "type": "output_text",
            "text": self._text if text is None else text,
            "annotations": [],
            "logprobs": self._logprobs if logprobs is None else logprobs,
        }
        name = f"msg_{self._head.number}"
        head = {"id": name, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [part]}


def messages_of(items: Sequence[Fields]) -> list[Message]:
    """Chat messages from the items of ``input`` or ``output``: messages, function calls and their
    results.

    A turn's text and its function calls become one message, as the policy wrote them.
    """
    messages: list[Message] = []
    in_turn = False
    """Whether the last message is the policy's and can take function calls."""
    for item in items:
        match item.get("type", "message"):
            case "reasoning":
                continue
            case "message":
                content = _content(item.get("content"))
                messages.append({"role": item.get("role"), "content": content})
                in_turn = item.get("role") == "assistant"
            case "function_call":
                if not in_turn:
                    messages.append({"role": "assistant", "content": ""})
                in_turn = True
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _content(item.get("output"))
                answer = {"tool_call_id": item.get("call_id"), "content": output}
                messages.append({"role": "tool", **answer})
                in_turn = False
            case kind:
                why = f"'{kind}' items are not served; valid: {', '.join(ITEMS)}"
                raise BadRequest(why, "input")
    return messages


def _content(content: object) -> Any:
    """A chat message's content. Both interfaces hold a part's text under ``text``; a refusal counts
    as text."""
    if not isinstance(content, list | tuple):
        return content
    plain: list[Any] = []
    for raw in content:
        part = as_dict(raw)
        fields = part if isinstance(part, Mapping) else {}
        text = fields.get("text", fields.get("refusal"))
        plain.append(raw if text is None else {"type": "text", "text": text})
    return plain
