"""Tools: plain typed functions with docstrings that the policy may call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.environments.tool_calls import BadCall, ToolCall
from tunesmith.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, and what the policy is told about it."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    """JSON schema in OpenAI's form, as chat templates take it."""


def make_tool(function: Callable[..., Any], reference: str) -> Tool:
    """A tool from a function with typed arguments and a docstring that describes each (Google's style).

    Raises:
        ConfigError: types or descriptions are missing; says which.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException and what they hide
        raise ConfigError(
            f"'{reference}' cannot be a tool: {error}. A tool has a type for each argument and a docstring that says "
            "what it does and, under 'Args:', describes each argument."
        ) from error
    return Tool(schema["function"]["name"], function, schema)


def find(call: ToolCall | BadCall, tools: Mapping[str, Tool]) -> Tool | BadCall:
    """The tool that a call means, if it can be called so."""
    if isinstance(call, BadCall):
        return call
    tool = tools.get(call.name)
    if tool is None:
        return BadCall(f"there is no tool '{call.name}'.{nearest(call.name, tools)}".rstrip("."), call.name)
    try:
        inspect.signature(tool.function).bind(**call.arguments)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(tool.function).parameters)
        return BadCall(f"wrong arguments for {call.name}({parameters}): {error}", json.dumps(call.arguments))
    return tool


def answer_of(result: object) -> str:
    """What a tool returned, as the policy reads it: text as it is, all else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
