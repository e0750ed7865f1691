"""What a line of data holds, found from its columns, and converted to one shape.

Known formats: plain text; a prompt; a prompt with a completion; a conversation (``messages``, or ShareGPT's
``conversations`` with ``from`` and ``value``). A prompt or completion may itself be a list of messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunesmith.data.sources import Columns, Row
from tunesmith.errors import nearest, shortened
from tunesmith.types import Message, Prompt

Goal = Literal["rl", "sft", "pairs", "judged", "steps"]

PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input")
COMPLETIONS = ("completion", "response", "output", "answer", "solution", "target")
CONVERSATIONS = ("messages", "conversations", "conversation")
TEXT = "text"

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


@dataclass(frozen=True, slots=True)
class Format:
    """Which columns hold what ("": none). ``context`` is Alpaca's optional ``input`` beside ``instruction``."""

    kind: Literal["text", "prompt", "prompt_completion", "messages", "pairs", "judged", "steps"]
    prompt: str = ""
    completion: str = ""
    context: str = ""
    text: str = ""
    messages: str = ""

    def describe(self, goal: Goal) -> str:
        """A short sentence for the resolved configuration."""
        prompt = f"'{self.prompt}'" + (f" (and '{self.context}' where given)" if self.context else "")
        match self.kind:
            case "text":
                return f"plain text in '{self.text}'"
            case "prompt":
                return f"prompts in {prompt}"
            case "prompt_completion":
                return f"prompts in {prompt}, completions in '{self.completion}'"
            case "messages":
                tail = "; a final assistant turn is not part of the prompt" if goal == "rl" else ""
                return f"conversations in '{self.messages}'{tail}"
            case "pairs":
                before = f"prompts in {prompt}" if self.prompt else "prompts as far as both begin alike"
                return f"{before}, answers in 'chosen' and 'rejected'"
            case "judged":
                return f"prompts in {prompt}, completions in '{self.completion}', judged by 'label'"
            case "steps":
                if self.text:
                    return f"answers in '{self.text}', judged at their separators by '{self.completion}'"
                return f"prompts in {prompt}, steps in 'completions', judged by 'labels'"


@dataclass(frozen=True, slots=True)
class Example:
    """A line in one shape. Exactly one of ``text`` and ``prompt`` is set; RL has no ``completion``.

    For a conversation in supervised training, ``prompt`` is empty and ``completion`` is all of it.
    """

    where: str
    id: str
    text: str | None = None
    prompt: Prompt | None = None
    completion: Prompt | None = None
    rejected: Prompt | None = None
    """The answer that ``completion`` is preferred to."""
    margin: float = 0.0
    desirable: bool | None = None
    steps: tuple[str, ...] = ()
    labels: tuple[float, ...] = ()
    """How likely each step is good: 0 or 1, or anything between."""
    tags: str | list[Any] | None = None
    """Labels of the steps of ``text``: a copy of it with labels for separators, or a list."""
    tools: list[Any] | None = None
    columns: Columns = field(default_factory=dict[str, Any])
    source: int = 0
    """Index of the source that it is from."""


def detect(row: Row, goal: Goal, prompt: str | None = None, completion: str | None = None) -> Format:
    """The format of a line, from its column names and what the configuration says; or a BadLine."""
    check_named(row, prompt, completion)
    columns, training = row.columns.keys(), goal == "sft"
    if prompt is None and completion is None:
        conversation = next((name for name in CONVERSATIONS if name in columns), None)
        canonical = {"prompt", "completion"} if training else {"prompt"}
        if conversation and not canonical <= columns:
            return Format("messages", messages=conversation)
        if training and TEXT in columns and (columns.isdisjoint(PROMPTS) or columns.isdisjoint(COMPLETIONS)):
            return Format("text", text=TEXT)
    if prompt in CONVERSATIONS and completion is None:
        return Format("messages", messages=prompt)
    asking = prompt or only_column(row, PROMPTS, "data.prompt")
    if asking and not training:
        return Format("prompt", prompt=asking, context=context_of(asking))
    answering = completion or (only_column(row, COMPLETIONS, "data.completion") if training else None)
    if asking and answering:
        return Format("prompt_completion", prompt=asking, completion=answering, context=context_of(asking))
    missing, found = "completion" if asking else "prompt", found_columns(row)
    needed = f"needs one of {', '.join(PROMPTS)} or {CONVERSATIONS[0]}"
    if training:
        needed = (
            f"supervised training needs 'messages', 'text', or a prompt ({', '.join(PROMPTS)}) with a completion "
            f"({', '.join(COMPLETIONS)})"
        )
    raise row.bad(f"no {missing}; found columns: {found}; {needed}, or set data.{missing}")


def check_named(row: Row, prompt: str | None, completion: str | None) -> None:
    """Refuse a line without the columns that the configuration names."""
    for name, key in ((prompt, "data.prompt"), (completion, "data.completion")):
        if name is not None and name not in row.columns:
            close = nearest(name, row.columns)
            raise row.bad(f"no column '{name}' ({key}), found: {found_columns(row)}.{close}".rstrip("."))


def context_of(prompt: str) -> str:
    return "input" if prompt == "instruction" else ""


def found_columns(row: Row) -> str:
    return ", ".join(row.columns) or "none"


def only_column(row: Row, names: tuple[str, ...], key: str) -> str | None:
    """The one of ``names`` that the line has. The first name is canonical; two others are ambiguous."""
    present = [name for name in names if name in row.columns]
    if "instruction" in present and "input" in present:
        present.remove("input")
    if len(present) > 1 and present[0] != names[0]:
        raise row.bad(f"the columns {', '.join(present)} could each be meant; say which with {key}")
    return present[0] if present else None


def convert(row: Row, form: Format, goal: Goal) -> Example:
    """The line in one shape; every column but ``prompt`` is passed on untouched.

    Raises:
        BadLine: a column is missing, empty or of the wrong type.
    """
    made = unread(row)
    if form.kind == "text":
        return replace(made, text=read_text(row, form.text), tools=None)
    if form.kind == "messages":
        messages = read_messages(row, form.messages)
        if goal == "sft":
            return replace(made, prompt=[], completion=messages)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise row.bad(f"'{form.messages}' holds nothing before the assistant's turn")
        return replace(made, prompt=messages)
    prompt = read_prompt(row, form)
    if goal == "rl":
        return replace(made, prompt=prompt)
    completion = read_side(row, form.completion)
    return replace(made, prompt=asked(prompt, completion), completion=completion)


def unread(row: Row) -> Example:
    """The example of a line before its prompt and answers are read."""
    columns = {name: value for name, value in row.columns.items() if name != "prompt"}
    identity = row.columns.get("id")
    made_id = str(identity) if isinstance(identity, str | int) and str(identity) else row.where
    return Example(row.where, made_id, tools=read_tools(row), columns=columns)


def asked(prompt: Prompt, answer: Prompt) -> Prompt:
    """A text prompt as a user's turn where the answer is a conversation."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) and isinstance(answer, list) else prompt


def read_prompt(row: Row, form: Format) -> Prompt:
    prompt = read_side(row, form.prompt)
    if isinstance(prompt, list):
        if prompt[-1]["role"] == "assistant":
            raise row.bad(f"'{form.prompt}' ends with an assistant turn, so nothing is left to answer")
        return prompt
    return f"{prompt}\n\n{read_text(row, form.context)}" if form.context and row.columns.get(form.context) else prompt


def read_value(row: Row, name: str) -> Any:
    if name not in row.columns:
        raise row.bad(f"no column '{name}', found: {found_columns(row)}")
    value = row.columns[name]
    if value is None:
        raise row.bad(f"'{name}' is null")
    return value


def read_text(row: Row, name: str) -> str:
    value = read_value(row, name)
    if not isinstance(value, str):
        raise row.bad(f"'{name}' is {type(value).__name__} ({brief(value)}), needs text")
    if not value:
        raise row.bad(f"'{name}' is empty")
    check_unicode(row, name, value)
    return value


def read_side(row: Row, name: str) -> Prompt:
    value = read_value(row, name)
    return read_messages(row, name) if isinstance(value, list) else read_text(row, name)


def check_unicode(row: Row, name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"'{name}' has half of a surrogate pair at character {error.start}; no tokenizer reads that"
        raise row.bad(reason) from error


def brief(value: object) -> str:
    return shortened(repr(value), 40)


def read_tools(row: Row) -> list[Any] | None:
    """The tools a conversation may call: a list of JSON schemas, or the same as JSON text."""
    value = row.columns.get("tools")
    if not value:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise row.bad(f"'tools' is text, but not JSON ({error})") from error
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise row.bad(f"'tools' is {brief(value)}, needs a list of JSON schemas")
    return value


def read_messages(row: Row, name: str) -> list[Message]:
    value = read_value(row, name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            reason = f"'{name}' is text, needs a list of messages (or that list as JSON)"
            raise row.bad(reason) from error
    if not isinstance(value, list):
        raise row.bad(f"'{name}' is {type(value).__name__}, needs a list of messages")
    if not value:
        raise row.bad(f"'{name}' is empty")
    return [_message(row, f"{name}[{i}]", item) for i, item in enumerate(value)]


def _message(row: Row, place: str, item: Any) -> Message:
    """One message with a known role and text content. Keys that are null (absent, in a table) are dropped."""
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
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(row, place, part) for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if message.get("weight", 1) not in (0, 1):
        raise row.bad(f"{place} has weight {brief(message['weight'])}; it can be 1 (learned) or 0 (not)")
    if not isinstance(content, str):
        raise row.bad(f"{place} has no text in 'content', found: {', '.join(message)}")
    check_unicode(row, f"{place}.content", content)
    return {**message, "content": content}


def _part(row: Row, place: str, part: Any) -> str:
    known: Mapping[str, Any] = part if isinstance(part, Mapping) else {}
    text = known.get("text")
    if known.get("type", "text") != "text" or not isinstance(text, str):
        raise row.bad(f"{place} has a part that is not text ({brief(part)}); only text can be trained")
    return text
