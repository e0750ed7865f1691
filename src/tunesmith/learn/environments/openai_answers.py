"""The policy's turns as OpenAI's JSON: answers and streams of ``chat.completions``,
``completions``, ``responses``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from tunesmith.learn.environments.conversation import Reply
from tunesmith.learn.environments.openai_requests import Fields, Json

Event = tuple[str | None, str]
"""A server-sent event: its name, if it has one, and its data."""
Decode = Callable[[Sequence[int]], str]


def chat_choice(index: int, reply: Reply, decode: Decode | None) -> Json:
    """A choice of a chat answer; with log-probabilities if there is a ``decode``.

    Alternatives to the sampled tokens are unknown, so ``top_logprobs`` holds only the token itself.
    """
    message = {"content": None, "refusal": None, "tool_calls": None, **reply.message}
    content: list[Json] = []
    for text, logprob in _tokens(reply, decode) if decode else ():
        raw = None if "\ufffd" in text else list(text.encode())
        entry = {"token": text, "logprob": logprob, "bytes": raw}
        content.append({**entry, "top_logprobs": [entry]})
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": content, "refusal": None} if decode else None,
        "finish_reason": "tool_calls" if "tool_calls" in reply.message else _finish_reason(reply),
    }


def text_choice(index: int, reply: Reply, echo: str, decode: Decode | None) -> Json:
    """A choice of a text answer, after ``echo``."""
    logprobs = None
    if decode:
        tokens = _tokens(reply, decode)
        texts = [text for text, _ in tokens]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": [{text: logprob} for text, logprob in tokens],
            "text_offset": list(accumulate(map(len, texts), initial=len(echo)))[:-1],
        }
    return {
        "index": index,
        "text": echo + reply.text,
        "finish_reason": _finish_reason(reply),
        "logprobs": logprobs,
    }


def _tokens(reply: Reply, decode: Decode) -> list[tuple[str, float]]:
    """Text and log-probability of each token of a turn."""
    completion = reply.completion
    sampled = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(decode([token]), logprob) for token, logprob in sampled]


def _finish_reason(reply: Reply) -> str:
    return "length" if reply.completion.finish_reason == "length" else "stop"


def as_response(request: Fields, chat: Fields) -> Json:
    """The answer to a ``responses`` request from the answer to its chat request."""
    number = chat["id"].rpartition("-")[2]
    choice = chat["choices"][0]
    usage = chat["usage"]
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
        "output": _output(choice, number, status),
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


def _output(choice: Fields, number: str, status: str) -> list[Json]:
    """The items of a response: a message, unless it is empty next to calls, and the function
    calls."""
    message = choice["message"]
    logprobs = choice["logprobs"]
    calls: list[Any] = message["tool_calls"] or []
    items: list[Json] = []
    if message["content"] or not calls:
        part = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
            "logprobs": logprobs["content"] if logprobs else [],
        }
        head = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        items.append({**head, "status": status, "content": [part]})
    for index, call in enumerate(calls):
        head = {"id": f"fc_{number}_{index}", "type": "function_call", "status": "completed"}
        items.append({**head, "call_id": call["id"], **call["function"]})
    return items


def chat_events(answer: Json, request: Fields) -> Iterator[Event]:
    """Each choice in one chunk, its finish reason in another; then the usage, if requested."""
    chunks: list[Json] = []
    for choice in answer["choices"]:
        written = choice["message"]["tool_calls"] or ()
        calls = [{"index": index, **call} for index, call in enumerate(written)]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        whole = {**choice, "delta": delta, "finish_reason": None}
        del whole["message"]
        ended = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks += [whole, ended]
    return text_events({**answer, "object": "chat.completion.chunk", "choices": chunks}, request)


def text_events(answer: Json, request: Fields) -> Iterator[Event]:
    """Each choice in one chunk; then the usage, if requested."""
    head = {name: value for name, value in answer.items() if name != "usage"}
    yield from ((None, json.dumps({**head, "choices": [choice]})) for choice in answer["choices"])
    options = request.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield None, json.dumps({**head, "choices": [], "usage": answer["usage"]})
    yield None, "[DONE]"


def response_events(response: Json, _: Fields) -> Iterator[Event]:
    """Each item whole, in one delta."""
    empty = {"output": [], "usage": None, "incomplete_details": None}
    begun = {**response, "status": "in_progress", **empty}
    kinds = ("response.created", "response.in_progress")
    events: list[Json] = [{"type": kind, "response": begun} for kind in kinds]
    for index, item in enumerate(response["output"]):
        events += _events_of(item, {"output_index": index, "item_id": item["id"]})
    end = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
    events.append({"type": end, "response": dict(response)})
    for number, event in enumerate(events):
        yield event["type"], json.dumps({**event, "sequence_number": number})


def _events_of(item: Fields, place: Fields) -> Iterator[Json]:
    is_message = item["type"] == "message"
    empty = {"content": []} if is_message else {"arguments": ""}
    bare = {**item, "status": "in_progress", **empty}
    index = place["output_index"]
    yield {"type": "response.output_item.added", "output_index": index, "item": bare}
    if is_message:
        (part,) = item["content"]
        at = {**place, "content_index": 0}
        with_logprobs = {**at, "logprobs": part["logprobs"]}
        empty = {**part, "text": "", "logprobs": []}
        yield {"type": "response.content_part.added", **at, "part": empty}
        yield {"type": "response.output_text.delta", **with_logprobs, "delta": part["text"]}
        yield {"type": "response.output_text.done", **with_logprobs, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        arguments = item["arguments"]
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "arguments": arguments, "name": item["name"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
