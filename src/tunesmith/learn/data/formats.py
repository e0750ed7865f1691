"""Detection of a data row's format from its columns, and conversion to an ``Example``.

For RL and supervised training: plain text; a prompt; a prompt with a completion; a conversation
(``messages``, or ShareGPT's ``conversations`` with ``from`` and ``value``). For reward models and
preferences, TRL's formats: a pair of answers; an answer with a label; an answer in steps with
labels, also in Math-Shepherd's format. A prompt or an answer can be a list of messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunesmith.errors import nearest
from tunesmith.learn.data.images import COLUMNS as IMAGES
from tunesmith.learn.data.images import NamedImage, named_in_columns, taken_from
from tunesmith.learn.data.sources import Columns, SourceRow
from tunesmith.learn.data.trie import common_length
from tunesmith.learn.data.unread import check_unread
from tunesmith.learn.data.values import (
    Tools,
    column_names,
    read_margin,
    read_messages,
    read_prompt,
    read_steps,
    read_text,
    read_tools,
    read_truth,
    read_typed,
)
from tunesmith.types import Message, Prompt, as_messages

Goal = Literal["rl", "sft", "pairs", "judged", "steps"]
Kind = Literal[
    "text", "prompt", "prompt_completion", "messages", "pairs", "judged", "steps", "tagged"
]

PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input")
COMPLETIONS = ("completion", "response", "output", "answer", "solution", "target")
CONVERSATIONS = ("messages", "conversations", "conversation")
TEXT = "text"
STEP_TAGS = ("label", "value")

COLUMNS: dict[Goal, tuple[Kind, tuple[str, ...]]] = {
    "rl": ("prompt", ()),
    "sft": ("prompt_completion", ()),
    "pairs": ("pairs", ("chosen", "rejected")),
    "judged": ("judged", ("label",)),
    "steps": ("steps", ("completions", "labels")),
}
"""The usual format of each goal, and the columns that it requires besides a prompt and a
completion."""
NEEDS: dict[Goal, str] = {
    "rl": f"one of {', '.join(PROMPTS)} or {CONVERSATIONS[0]}",
    "sft": f"'messages', 'text', or a prompt ({', '.join(PROMPTS)}) with a completion "
    f"({', '.join(COMPLETIONS)})",
    "pairs": "'chosen' and 'rejected'",
    "judged": "a prompt, a completion and 'label'; or 'chosen' and 'rejected'",
    "steps": "a prompt, 'completions' (steps) and 'labels'; or 'input' with separators and 'label'",
}
DESCRIPTIONS: dict[Kind, str] = {
    "text": "plain text in {column}",
    "prompt": "prompts in {column}",
    "prompt_completion": "prompts in {column}, completions in '{completion}'",
    "messages": "conversations in {column}",
    "pairs": "prompts in {column}, answers in 'chosen' and 'rejected'",
    "judged": "prompts in {column}, completions in '{completion}', judged by 'label'",
    "steps": "prompts in {column}, steps in 'completions', judged by 'labels'",
    "tagged": "answers in {column}, judged at their separators by '{completion}'",
}


@dataclass(frozen=True, slots=True)
class Format:
    """The kind of a row, and its columns ("": none)."""

    kind: Kind
    column: str = ""
    """The column of the prompt, the conversation or the text."""
    completion: str = ""
    context: str = ""
    """Alpaca's optional ``input`` next to ``instruction``."""

    def describe(self, goal: Goal) -> str:
        """A short sentence for the resolved configuration."""
        if self.kind == "pairs" and not self.column:
            return "prompts are what both answers begin with, answers in 'chosen' and 'rejected'"
        context = f" (and '{self.context}' where given)" if self.context else ""
        column = f"'{self.column}'{context}"
        text = DESCRIPTIONS[self.kind].format(column=column, completion=self.completion)
        if (self.kind, goal) == ("messages", "rl"):
            text += "; a final assistant turn is not part of the prompt"
        return text


@dataclass(frozen=True, slots=True)
class Example:
    """A row in the representation common to all formats; exactly one of ``text`` and ``prompt`` is
    set.

    RL has no ``completion``. A conversation in supervised training is the ``completion`` of an
    empty ``prompt``.
    """

    where: str
    id: str
    text: str | None = None
    prompt: Prompt | None = None
    completion: Prompt | None = None
    rejected: Prompt | None = None
    """The rejected answer; ``completion`` is the preferred one."""
    margin: float = 0.0
    desirable: bool | None = None
    steps: tuple[str, ...] = ()
    labels: tuple[float, ...] = ()
    """The probability that each step is good."""
    tags: str | list[Any] | None = None
    """Labels of the steps of ``text``: a list, or a copy of the text with labels instead of
    separators."""
    tools: Tools = None
    images: tuple[NamedImage, ...] = ()
    """In the order of their places."""
    columns: Columns = field(default_factory=dict[str, Any])
    source: int = 0
    """Index of the source."""


def detect(
    row: SourceRow, goal: Goal, prompt: str | None = None, completion: str | None = None
) -> Format:
    """The format of a row, from its columns and the names ``data.prompt`` and ``data.completion``.

    Raises:
        BadLine: the columns fit no format.
    """
    for name, key in ((prompt, "data.prompt"), (completion, "data.completion")):
        if name is not None and name not in row.columns:
            present = f"{column_names(row)}.{nearest(name, row.columns)}".rstrip(".")
            raise row.bad(f"no column '{name}' ({key}), found: {present}")
    columns = row.columns.keys()
    form = _without_prompt_column(row, goal, prompt, completion)
    if form:
        return form
    asking = prompt or _only_column(row, PROMPTS, "data.prompt")
    context = "input" if asking == "instruction" else ""
    if goal in ("pairs", "judged") and completion is None and {"chosen", "rejected"} <= columns:
        return Format("pairs", asking, context=context)
    kind, needed = COLUMNS[goal]
    answering = completion or ""
    if goal in ("sft", "judged"):
        answering = answering or _only_column(row, COMPLETIONS, "data.completion")
        needed = (answering or "completion", *needed)
    if asking and set(needed) <= columns:
        return Format(kind, asking, answering, context)
    missing = [name for name in needed if name not in columns]
    settable = ""
    if goal in ("rl", "sft"):
        missing = missing if asking else ["prompt"]
        settable = f", or set data.{missing[0]}"
    hints = (nearest(name, columns) for name in missing)
    close = next((hint for hint in hints if "Did" in hint), "")
    names = " and no ".join(missing) or "prompt"
    needs = f"{NEEDS[goal]}{settable}.{close}".rstrip(".")
    raise row.bad(f"no {names}; found columns: {column_names(row)}; needs {needs}")


def _without_prompt_column(
    row: SourceRow, goal: Goal, prompt: str | None, completion: str | None
) -> Format | None:
    """The format of a row that is a conversation, plain text, or text with separators between its
    steps."""
    columns = row.columns.keys()
    unnamed = prompt is None and completion is None
    if goal == "steps" and prompt is None and "input" in columns and "completions" not in columns:
        tags = next((name for name in STEP_TAGS if name in columns), None)
        return Format("tagged", "input", tags) if tags else None
    if goal not in ("rl", "sft"):
        return None
    if prompt in CONVERSATIONS and completion is None:
        return Format("messages", prompt)
    canonical = {"prompt", "completion"} if goal == "sft" else {"prompt"}
    conversation = next((name for name in CONVERSATIONS if name in columns), None)
    if unnamed and conversation and not canonical <= columns:
        return Format("messages", conversation)
    lacks_one = columns.isdisjoint(PROMPTS) or columns.isdisjoint(COMPLETIONS)
    is_text = unnamed and goal == "sft" and TEXT in columns and lacks_one
    return Format("text", TEXT) if is_text else None


def _only_column(row: SourceRow, names: tuple[str, ...], key: str) -> str:
    """The row's column among ``names``, or "". The first name takes precedence; two other names are
    ambiguous."""
    present = [name for name in names if name in row.columns]
    if "instruction" in present and "input" in present:
        present.remove("input")
    if len(present) > 1 and present[0] != names[0]:
        raise row.bad(f"the columns {', '.join(present)} could each be meant; choose with {key}")
    return present[0] if present else ""


def convert(row: SourceRow, form: Format, goal: Goal) -> Example:
    """The row as an example; every column except ``prompt`` is passed on unchanged, and of images
    the names.

    Raises:
        BadLine: a column is missing, empty or of the wrong type.
    """
    check_unread(row, goal, form.kind)
    return _with_images(row, _convert(row, form, goal))


def _with_images(row: SourceRow, example: Example) -> Example:
    """The example with the images that its line names, which its messages no longer name.

    Raises:
        BadLine: they are named twice, or the two answers of a pair have different ones.
    """
    named = named_in_columns(row)
    asked, prompt = taken_from(example.prompt)
    answered, completion = taken_from(example.completion)
    others, rejected = taken_from(example.rejected)
    inline = [*asked, *answered]
    if named and inline:
        raise row.bad(
            "images are named in the messages and in a column of the line; name them in one place"
        )
    if example.rejected is not None and others != answered:
        raise row.bad("'chosen' and 'rejected' name different images; name them in the prompt")
    images = tuple(named or inline)
    if not images:
        return example
    names = [image.name for image in images]
    columns = {k: v for k, v in example.columns.items() if k not in IMAGES} | {"images": names}
    sides = {"prompt": prompt, "completion": completion, "rejected": rejected}
    return replace(example, **sides, images=images, columns=columns)


def _convert(row: SourceRow, form: Format, goal: Goal) -> Example:
    identity = row.columns.get("id")
    identity = str(identity) if isinstance(identity, str | int) and str(identity) else row.where
    columns = {name: value for name, value in row.columns.items() if name != "prompt"}
    tools = None if form.kind == "text" else read_tools(row)
    example = Example(row.where, identity, tools=tools, columns=columns)
    match form.kind:
        case "text":
            return replace(example, text=read_text(row, form.column))
        case "tagged":
            tags: str | list[Any] = read_typed(row, form.completion, (str, list), "text or a list")
            return replace(example, text=read_text(row, form.column), tags=tags)
        case "messages":
            messages = read_messages(row, form.column)
            if goal == "sft":
                return replace(example, prompt=[], completion=messages)
            prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            if not prompt:
                raise row.bad(f"'{form.column}' holds nothing before the assistant's turn")
            return replace(example, prompt=prompt)
        case "pairs":
            prompt, chosen, rejected = _pair(row, form)
            example = replace(example, prompt=prompt, margin=read_margin(row))
            return replace(example, completion=chosen, rejected=rejected)
        case _:
            prompt = _prompt(row, form)
            example = replace(example, prompt=prompt)
    if form.kind == "steps":
        steps, labels = read_steps(row)
        example = replace(example, steps=steps, labels=labels)
    if form.completion:
        completion = read_prompt(row, form.completion)
        example = replace(example, prompt=_asked(prompt, completion), completion=completion)
    if form.kind == "judged":
        label = read_truth(row, "label", "true (desirable) or false")
        example = replace(example, desirable=label)
    return example


def _asked(prompt: Prompt, answer: Prompt) -> Prompt:
    """The prompt; a text prompt becomes a user turn if the answer is a conversation."""
    return as_messages(prompt) if isinstance(answer, list) else prompt


def _prompt(row: SourceRow, form: Format) -> Prompt:
    prompt = read_prompt(row, form.column)
    if isinstance(prompt, list):
        if prompt[-1]["role"] == "assistant":
            raise row.bad(f"'{form.column}' ends with an assistant turn; nothing is left to answer")
        return prompt
    if form.context and row.columns.get(form.context):
        return f"{prompt}\n\n{read_text(row, form.context)}"
    return prompt


def _pair(row: SourceRow, form: Format) -> tuple[Prompt, Prompt, Prompt]:
    """Prompt, chosen and rejected answer; without a prompt column, the prompt is the answers'
    common prefix."""
    chosen, rejected = (read_prompt(row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise row.bad("'chosen' and 'rejected' are the same, so nothing is preferred")
    prompt = _prompt(row, form) if form.column else None
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _pair_of_conversations(row, prompt, chosen, rejected)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise row.bad("one of 'chosen' and 'rejected' is text and the other a conversation")
    if prompt is None:
        at = common_length(chosen, rejected)
        # The prompt ends before a space: no word is cut, and the answers begin as they would be
        # sampled.
        prompt = re.sub(r"\S*$", "", chosen[:at]).rstrip()
        if not prompt:
            raise row.bad("there is no prompt, and 'chosen' and 'rejected' do not begin alike")
        chosen = chosen[len(prompt) :]
        rejected = rejected[len(prompt) :]
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise row.bad(f"'{name}' is empty")
    return prompt, chosen, rejected


def _pair_of_conversations(
    row: SourceRow, prompt: Prompt | None, chosen: list[Message], rejected: list[Message]
) -> tuple[Prompt, Prompt, Prompt]:
    """As ``_pair``, for conversations that are answers to the prompt or begin with it."""
    if prompt is None or chosen[0]["role"] != "assistant":
        alike = common_length(chosen, rejected)
        prompt = chosen[:alike]
        chosen = chosen[alike:]
        rejected = rejected[alike:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise row.bad(f"'{name}' has no answer: it is the beginning of the other")
        role = answer[0]["role"]
        if role != "assistant":
            differs = f"'{name}' differs from the other in a turn of the {role}"
            raise row.bad(f"{differs}; the two must answer one prompt")
        turns = [turn for turn in answer if turn["role"] == "assistant"]
        if not any(turn["content"].strip() or turn.get("tool_calls") for turn in turns):
            raise row.bad(f"'{name}' is empty")
    if not prompt:
        raise row.bad("there is no prompt before the answers in 'chosen' and 'rejected'")
    return _asked(prompt, chosen), chosen, rejected
