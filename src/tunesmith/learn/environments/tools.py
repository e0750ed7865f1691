"""Tools, which are plain typed functions with docstrings, and the policy's calls to them.

Calls are parsed from the policy's text in the three notations of chat templates. An unreadable call
becomes a ``BadCall``: the policy gets the reason, or the episode ends.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.errors import ConfigError, nearest
from tunesmith.learn.usercode.calls import Function
from tunesmith.records.foreign import first_json, json_or, parse_json
from tunesmith.types import Tools

EXPECTED = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class BadCall:
    """An attempted call, and the reason why it is not valid."""

    reason: str


Calls = list[ToolCall | BadCall]
Parse = Callable[[str, str, Tools], tuple[str, Calls]]
"""Maps a turn, with and without special tokens, and the tools that it may call, to the text around
its calls, and the calls."""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"


def parser_for(template: str) -> Parse:
    """The parser for this chat template's notation of calls; Hermes if the template shows none."""
    if "<tool_call>" in template:
        return parse_hermes
    if _MISTRAL in template:
        return parse_mistral
    if _PYTHON_TAG in template or '"parameters"' in template:
        return parse_llama
    return parse_hermes


def marks_of(parse: Parse) -> tuple[str, ...]:
    """Texts with one of which a notation's calls begin."""
    if parse is parse_llama:
        return (_PYTHON_TAG, "{")
    return (_MISTRAL,) if parse is parse_mistral else ("<tool_call>",)


def parse_hermes(raw: str, text: str, tools: Tools = None) -> tuple[str, Calls]:
    """Any number of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen).

    A block may also hold ``<function=name><parameter=key>value</parameter></function>``
    (Qwen3-Coder), where a value that its tool describes as text stays text. Calls before
    ``</think>`` do not count.
    """
    source = text if "<tool_call>" in text else raw
    thought, closed, spoken = source.rpartition("</think>")
    calls: Calls = []
    for block in _BLOCK.finditer(spoken):
        function = _FUNCTION.search(block[1])
        if function:
            name = function[1].strip()
            texts = _text_arguments(name, tools)
            pairs = [(key.strip(), value) for key, value in _PARAMETER.findall(function[2])]
            calls.append(ToolCall(name, {k: v if k in texts else json_or(v, v) for k, v in pairs}))
            continue
        try:
            calls.append(_check(parse_json(block[1])))
        except ValueError as error:
            calls.append(BadCall(f"the tool call is not valid JSON: {error}"))
    if not calls:
        return text, []
    return f"{thought}{closed}{_BLOCK.sub('', spoken)}".rstrip(), calls


def _text_arguments(name: str, tools: Tools) -> set[str]:
    """The arguments of a tool whose schema says that they are text."""
    for tool in tools or ():
        match tool:
            case {"function": {"name": called, "parameters": {"properties": {**fields}}}} if (
                called == name
            ):
                described = ((key, one) for key, one in fields.items() if isinstance(one, dict))
                return {str(key) for key, one in described if one.get("type") == "string"}
            case _:
                pass
    return set()


def parse_llama(raw: str, text: str, _: Tools = None) -> tuple[str, Calls]:
    """The whole turn is ``{"name": ..., "parameters": {...}}``, or several separated by ``;``
    (Llama 3).

    A turn that only begins like a call is a bad call; a turn without a call is text.
    """
    before, marked, tail = raw.rpartition(_PYTHON_TAG)
    body = (tail if before.strip() else text).strip()
    if not marked and not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', body):
        return text, []
    calls: Calls = []
    spoken = before.rstrip()
    while body:
        try:
            value, end = first_json(body)
        except ValueError as error:
            return spoken, [*calls, BadCall(f"the tool call is not valid JSON: {error}")]
        calls.append(_check(value))
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return spoken, calls


def parse_mistral(raw: str, text: str, _: Tools = None) -> tuple[str, Calls]:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` (Mistral)."""
    spoken, marker, body = raw.rpartition(_MISTRAL)
    if not marker:
        return text, []
    try:
        value = first_json(body.strip())[0]
    except ValueError as error:
        return spoken.rstrip(), [BadCall(f"the list of tool calls is not valid JSON: {error}")]
    items = value if isinstance(value, list) else [value]
    return spoken.rstrip(), [_check(item) for item in items]


def _check(value: object) -> ToolCall | BadCall:
    if not isinstance(value, Mapping):
        return BadCall(f"a tool call is an object {EXPECTED}")
    call = value["function"] if isinstance(value.get("function"), Mapping) else value
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return BadCall(f"the tool call names no tool; write {EXPECTED}")
    if isinstance(arguments, str):
        arguments = json_or(arguments, arguments)
    if not isinstance(arguments, Mapping):
        return BadCall(f"the arguments of '{name}' are not a JSON object; write {EXPECTED}")
    return ToolCall(name, dict(arguments))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function and its description for the policy."""

    name: str
    function: Function
    schema: dict[str, Any]
    """JSON schema in OpenAI's form, as chat templates take it."""


def make_tool(function: Function, reference: str) -> Tool:
    """A tool from a function with typed arguments, each described in its docstring (Google's
    style)."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException and others
        raise ConfigError(
            f"'{reference}' cannot be a tool: {error}. A tool has a type for each argument and a "
            "docstring that says what it does and, under 'Args:', describes each argument."
        ) from error
    return Tool(schema["function"]["name"], function, schema)


def valid_call(call: ToolCall | BadCall, tools: Mapping[str, Tool]) -> ToolCall | BadCall:
    """The call, if its tool exists and takes these arguments."""
    if isinstance(call, BadCall):
        return call
    tool = tools.get(call.name)
    if tool is None:
        return BadCall(f"there is no tool '{call.name}'.{nearest(call.name, tools)}".rstrip("."))
    try:
        inspect.signature(tool.function).bind(**call.arguments)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(tool.function).parameters)
        return BadCall(f"wrong arguments for {call.name}({parameters}): {error}")
    return call
