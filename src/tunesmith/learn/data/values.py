"""Validated values of a data row: text, messages, tools, labels; an unusable value raises a
``BadLine``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

from tunesmith.errors import nearest, shortened
from tunesmith.learn.data.images import IMAGE_MARK, PARTS, NamedImage, image_part
from tunesmith.learn.data.sources import SourceRow
from tunesmith.records.foreign import json_or, parse_json
from tunesmith.types import Message, Prompt, Task, Tools

V = TypeVar("V")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_response": "tool",
    "observation": "tool",
}


_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_KEYS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
"""Keys of which a message has one set at least."""


def column_names(row: SourceRow) -> str:
    return ", ".join(row.columns) or "none"


def read_value(row: SourceRow, name: str) -> Any:
    if name not in row.columns:
        raise row.bad(f"no column '{name}', found: {column_names(row)}")
    value = row.columns[name]
    if value is None:
        raise row.bad(f"'{name}' is null")
    return value


def read_typed(row: SourceRow, name: str, kind: type[V] | tuple[type[V], ...], needs: str) -> V:
    """A value of type ``kind``, which ``needs`` says in words."""
    value = read_value(row, name)
    if not isinstance(value, kind):
        raise row.bad(f"'{name}' is {_brief(value)}, needs {needs}")
    return value


def read_truth(row: SourceRow, name: str, needs: str) -> bool:
    value = row.scalar(name)
    return value if isinstance(value, bool) else read_typed(row, name, bool, needs)


def read_text(row: SourceRow, name: str) -> str:
    """A text; a number is read as the text that JSON writes for it."""
    value = read_value(row, name)
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise row.bad(f"'{name}' is {type(value).__name__} ({_brief(value)}), needs text")
    if not value:
        raise row.bad(f"'{name}' is empty")
    return _encodable(row, name, value)


def read_prompt(row: SourceRow, name: str) -> Prompt:
    """Text, or a list of messages, which may be JSON text, as in CSV files."""
    value = read_value(row, name)
    talk = isinstance(value, list) or (isinstance(value, str) and _is_talk(value))
    return read_messages(row, name) if talk else read_text(row, name)


def _is_talk(text: str) -> bool:
    """Whether a text is a list of messages, as JSON or as Python writes it."""
    if not _LIST_OF_OBJECTS.match(text):
        return False
    value = json_or(text, None)
    if value is None:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(text.strip())
    items: list[object] = value if isinstance(value, list) else [None]
    return all(
        isinstance(item, dict) and any(keys <= item.keys() for keys in _KEYS) for item in items
    )


def read_tools(row: SourceRow) -> Tools:
    """The tools that a conversation may call: a list of JSON schemas, or that list as JSON text."""
    value = _from_json(row, "tools", row.columns.get("tools") or None)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise row.bad(f"'tools' is {_brief(value)}, needs a list of JSON schemas")
    return value


def row_of(task: Task) -> SourceRow:
    """A task's columns, to read values of."""
    return SourceRow("", f"task {task.id}", {**task.columns})


def read_messages(row: SourceRow, name: str) -> list[Message]:
    value = _from_json(row, name, read_value(row, name))
    if not isinstance(value, list):
        raise row.bad(f"'{name}' is {type(value).__name__}, needs a list of messages")
    if not value:
        raise row.bad(f"'{name}' is empty")
    return [_message(row, f"{name}[{i}]", item) for i, item in enumerate(value)]


def _from_json(row: SourceRow, name: str, value: object) -> Any:
    """The value, parsed if it is JSON text."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        wrong = f"'{name}' is text but not JSON ({error})"
        raise row.bad(f"{wrong}; needs a list, or that list as JSON") from error


def _message(row: SourceRow, place: str, item: object) -> Message:
    """A message with a known role and text content; null keys are dropped, because tables use null
    for absent keys."""
    if not isinstance(item, Mapping):
        raise row.bad(f"{place} is {type(item).__name__}, needs an object with role and content")
    message = {str(k): v for k, v in item.items() if v is not None}
    if "from" in message and "role" not in message:
        sender = message.pop("from")
        role = SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
        message = {"role": role, "content": message.pop("value", None), **message}
    role = message.get("role")
    if not isinstance(role, str):
        raise row.bad(f"{place} has no role, found: {', '.join(map(str, item)) or 'nothing'}")
    if role not in ROLES:
        raise row.bad(f"{place} has the unknown role '{role}'.{nearest(role, ROLES)}".rstrip("."))
    if message.get("weight", 1) not in (0, 1):
        weight = _brief(message["weight"])
        raise row.bad(f"{place} has weight {weight}; it can be 1 (learned) or 0 (not)")
    content = message.get("content")
    if "images" in message:
        raise row.bad(f"{place} has 'images'; name them in its parts or in the line's column")
    if isinstance(content, list):
        content, images = _text_of_parts(row, place, content)
        if role == "assistant" and IMAGE_MARK in content:
            raise row.bad(f"{place} is the assistant's and has an image, which it cannot write")
        message |= {"images": images} if images else {}
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise row.bad(f"{place} has no text in 'content', found: {', '.join(message)}")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [with_object_arguments(_call(row, place, call)) for call in calls]
    return {**message, "content": _encodable(row, f"{place}.content", content)}


def _call(row: SourceRow, place: str, call: object) -> Any:
    """A tool call in OpenAI's form; ``{"name": ..., "arguments": ...}`` alone is put into it."""
    fields = call if isinstance(call, Mapping) else {}
    if "function" not in fields and isinstance(fields.get("name"), str):
        inner = {"name": fields["name"], "arguments": fields.get("arguments", {})}
        rest = {key: value for key, value in fields.items() if key not in inner}
        return {"type": "function", **rest, "function": inner}
    function = fields.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        needs = "needs a 'function' with a 'name' and 'arguments'"
        raise row.bad(f"{place} has the tool call {_brief(call)}, {needs}")
    return call


def with_object_arguments(call: Any) -> Any:
    """A tool call whose JSON-text arguments (OpenAI's form) are parsed to the object that chat
    templates expect."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    written = function["arguments"]  # perhaps the policy's, and no JSON
    return {**call, "function": {**function, "arguments": json_or(written, written)}}


def _text_of_parts(
    row: SourceRow, place: str, parts: Sequence[object]
) -> tuple[str, list[NamedImage]]:
    """The text of a message's parts, with a mark for each image, and the images that they name."""
    texts: list[str] = []
    images: list[NamedImage] = []
    for part in parts:
        known: Mapping[str, object] = part if isinstance(part, Mapping) else {}
        text = known.get("text")
        if known.get("type") in PARTS:
            named = image_part(row, f"{place}.content[{len(texts)}]", known)
            images += [] if named is None else [named]
            text = IMAGE_MARK
        elif known.get("type", "text") != "text" or not isinstance(text, str):
            valid = "text and images are read"
            raise row.bad(f"{place} has a part of another kind ({_brief(part)}); {valid}")
        elif IMAGE_MARK in text:
            raise row.bad(f"{place} holds the code point U+FDD0, which marks images here")
        texts.append(text)
    return "".join(texts), images


def read_margin(row: SourceRow) -> float:
    value = row.scalar("margin")
    value = 0.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise row.bad(f"'margin' is {_brief(value)}, needs a number")
    return float(value)


def read_steps(row: SourceRow) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The steps in ``completions``, and the probabilities in ``labels`` that each is good."""
    steps: list[Any] = read_typed(row, "completions", list, "a list of steps")
    labels: list[Any] = read_typed(row, "labels", list, "a list with a label for each step")
    if not steps:
        raise row.bad(f"'completions' is {_brief(steps)}, needs a list of steps")
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise row.bad(f"step {number + 1} of 'completions' is {_brief(step)}, needs text")
        _encodable(row, f"completions[{number}]", step)
    for number, label in enumerate(labels, 1):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            needs = "needs true, false or a number from 0 to 1"
            raise row.bad(f"label {number} is {_brief(label)}, {needs}")
    if len(steps) != len(labels):
        counts = f"{len(steps)} steps in 'completions' and {len(labels)} 'labels'"
        raise row.bad(f"{counts}; give one each")
    return tuple(steps), tuple(map(float, labels))


def _encodable(row: SourceRow, name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"'{name}' has half of a surrogate pair at character {error.start}"
        raise row.bad(f"{half}; no tokenizer reads that") from error
    return text


def _brief(value: object) -> str:
    return shortened(repr(value), 40)
