"""Probes that show whether a chat template writes all parts of a message, and checks of the
variables it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.errors import ConfigError, boundary, nearest
from tunesmith.types import Message, Tokenizer

PROBE = "Zq7Probe"
TOOL_ROLES = ("tool", "function", "ipython")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys that hold the assistant's thinking in various vendors' data."""
CHATML = ("<|im_start|>", "<|im_end|>")
GIVEN = (
    "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now",
    "continue_final_message",
)  # fmt: skip
"""Variables that every rendering sets."""


def with_probes(
    messages: Sequence[Message], *, turn: bool
) -> tuple[list[Message], dict[str, tuple[int, str]]]:
    """The messages with a probe in each part except ``content``, and the message number and part by
    probe."""
    probes: dict[str, tuple[int, str]] = {}
    probed = list(messages)

    def probe(number: int, what: str) -> str:
        text = f"{PROBE}{len(probes)}q"
        probes[text] = (number, what)
        return text

    for place in [len(probed) - 1] if turn else range(len(probed)):
        message = probed[place]
        number = place + 1
        changed: Message = {}
        if message["role"] in TOOL_ROLES:
            changed["content"] = message["content"] + probe(number, "the tool's answer")
        elif isinstance(message.get("name"), str):
            changed["name"] = message["name"] + probe(number, "the name")
        for key in THOUGHTS if turn else ():
            if isinstance(message.get(key), str) and message[key].strip():
                changed[key] = message[key] + probe(number, f"'{key}'")
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            changed["tool_calls"] = [_probe_call(call, partial(probe, number)) for call in calls]
        if changed:
            probed[place] = {**message, **changed}
    return probed, probes


def _probe_call(call: object, probe: Callable[[str], str]) -> Any:
    """A tool call with a probe in its name and, if it has arguments, another in them."""
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function")
    inner = function if isinstance(function, Mapping) else outer
    if not isinstance(inner.get("name"), str):
        return call
    changed = {**inner, "name": inner["name"] + probe("a tool call")}
    arguments: Any = inner.get("arguments")
    if isinstance(arguments, Mapping) and arguments:
        text = probe("a tool call's arguments")
        changed["arguments"] = {**arguments, text: text}
    elif isinstance(arguments, str) and arguments.strip() not in ("", "{}"):
        changed["arguments"] = arguments + probe("a tool call's arguments")
    return {**outer, "function": changed} if inner is not outer else changed


def check_options(
    options: Mapping[str, object], source: str, tokens: Iterable[str]
) -> Mapping[str, Any]:
    """Return ``options``; ConfigError if the template does not read one of them or the rendering
    itself sets it."""
    if not options:
        return options
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
    with boundary(ConfigError, "the chat template cannot be read", TemplateError):
        read = meta.find_undeclared_variables(environment.parse(plain))
    free = sorted(read - {*GIVEN, *tokens, *environment.globals})
    for name in options:
        problem = ""
        if name in GIVEN or name in tokens:
            problem = f"leave '{name}' out; the rendering sets it."
        elif name not in free:
            known = f"{nearest(name, free)} It reads {', '.join(free) or 'none'}."
            problem = f"the chat template does not read '{name}'.{known}"
        if problem:
            key = "data.chat_template_kwargs"
            raise ConfigError(f"{key}: {problem}", keys=(key,))
    return options


def check_chatml(tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the tokens that ChatML's turns are made of are not in the vocabulary."""
    known = tokenizer.get_vocab()
    missing = [token for token in CHATML if token not in known]
    if missing:
        raise ConfigError(
            f"model.chat_template = 'hermes' writes {', '.join(missing)}, which the tokenizer does "
            "not have as a token: the template is for models whose turns are ChatML's. Name a "
            "template of the model's own tokens",
            keys=("model.chat_template",),
        )
