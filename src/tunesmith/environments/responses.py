"""OpenAI's ``responses`` interface in terms of ``chat.completions``: requests, answers and the events of a stream.

An item is one entry of a request's ``input`` or of a response's ``output``: a message, a function call, or what
the function returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunesmith.errors import EpisodeError, shortened
from tunesmith.types import Message

PASSED_ON = (
    "temperature", "top_p", "tool_choice", "parallel_tool_calls", "stop", "seed", "chat_template_kwargs"
)  # fmt: skip
KINDS: Mapping[str, type] = {
    "text": dict, "reasoning": dict, "tools": list, "include": list, "previous_response_id": str, "instructions": str
}  # fmt: skip
KIND_NAMES: Mapping[type, str] = {dict: "an object", list: "a list", str: "text"}
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log-probabilities."""


def check_kinds(request: Mapping[str, Any]) -> None:
    """Refuse (EpisodeError) parameters of another JSON type than the interface has."""
    for name, kind in KINDS.items():
        if request.get(name) is not None and not isinstance(request[name], kind):
            raise EpisodeError(f"'{name}' is {shortened(repr(request[name]))}; it must be {KIND_NAMES[kind]}")


def input_messages(request: Mapping[str, Any]) -> list[Message]:
    """What a request's ``input`` says: text or items; an EpisodeError where it is neither."""
    given = request.get("input", ())
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list | tuple):
        raise EpisodeError(f"'input' must be text or a list of items; it is {shortened(repr(given))}")
    return messages_of(given)


def as_chat_request(request: Mapping[str, Any], messages: Sequence[Message]) -> dict[str, Any]:
    """The ``chat.completions`` request that means the same, after ``messages``; ``instructions`` stand before them.

    Raises:
        EpisodeError: it asks for what a chat does not have.
    """
    if request.get("background"):
        raise EpisodeError("'background' cannot be served; leave it out")
    instructions = request.get("instructions")
    text, reasoning = request.get("text") or {}, request.get("reasoning") or {}
    chat = {
        **{name: request[name] for name in PASSED_ON if request.get(name) is not None},
        "messages": [*([{"role": "system", "content": instructions}] if instructions else []), *messages],
        "tools": [_chat_tool(tool) for tool in request.get("tools") or ()] or None,
        "max_completion_tokens": request.get("max_output_tokens"),
        "response_format": text.get("format"),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "logprobs": LOGPROBS in (request.get("include") or ()) or bool(request.get("top_logprobs")),
    }
    return {name: value for name, value in chat.items() if value is not None}


def messages_of(items: Sequence[Any]) -> list[Message]:
    """Chat messages of items. A turn's text and its function calls are one message, as the policy wrote them."""
    messages: list[Message] = []
    open_turn = False
    """Whether the last message is the policy's and may still get function calls."""
    for item in items:
        dump = getattr(item, "model_dump", None)
        item = dump(exclude_none=True) if callable(dump) else item
        if not isinstance(item, Mapping):
            raise EpisodeError(f"an item of 'input' is an object; this one is {shortened(repr(item))}")
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
            open_turn = item.get("role") == "assistant"
        elif kind == "function_call":
            if not open_turn:
                messages.append({"role": "assistant", "content": ""})
            open_turn = True
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            open_turn = False
        else:
            raise EpisodeError(f"an item of type '{kind}' cannot be served; valid: {', '.join(ITEMS)}")
    return messages


def _content(content: Any) -> Any:
    """A chat message's content: parts hold their text under the same name in both interfaces."""
    if not isinstance(content, list | tuple):
        return content
    return [_part(part) for part in content]


def _part(part: Any) -> Any:
    dump = getattr(part, "model_dump", None)
    part = dump(exclude_none=True) if callable(dump) else part
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
    return part if text is None else {"type": "text", "text": text}


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise EpisodeError(f"a tool must be of type 'function'; this one is {shortened(repr(tool))}")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def as_response(request: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    """The response that says what the answer ``chat`` to ``as_chat_request(request)`` says."""
    number = chat["id"].rpartition("-")[2]
    choice, usage = chat["choices"][0], chat["usage"]
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": chat["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "model": chat["model"],
        "output": _items(choice, number, status),
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "temperature": None,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": list(request.get("tools") or ()),
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(choice: Mapping[str, Any], number: str, status: str) -> list[dict[str, Any]]:
    message, logprobs = choice["message"], choice["logprobs"]
    calls: list[Any] = message["tool_calls"] or []
    items: list[dict[str, Any]] = []
    if message["content"] or not calls:
        text = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
            "logprobs": logprobs["content"] if logprobs else [],
        }
        base = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status}
        items.append({**base, "content": [text]})
    for index, call in enumerate(calls):
        name = {"call_id": call["id"], **call["function"]}
        items.append({"id": f"fc_{number}_{index}", "type": "function_call", "status": "completed", **name})
    return items


def stream_of(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events in which a streamed response is sent: each item whole, in one piece."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        events += _events_of(item, {"output_index": index, "item_id": item["id"]})
    end = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
    events.append({"type": end, "response": dict(response)})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _events_of(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    is_message = item["type"] == "message"
    bare = {**item, "status": "in_progress", **({"content": []} if is_message else {"arguments": ""})}
    index = place["output_index"]
    yield {"type": "response.output_item.added", "output_index": index, "item": bare}
    if is_message:
        (part,) = item["content"]
        at = {**place, "content_index": 0}
        said = {**at, "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": "", "logprobs": []}}
        yield {"type": "response.output_text.delta", **said, "delta": part["text"]}
        yield {"type": "response.output_text.done", **said, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "arguments": arguments, "name": item["name"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
