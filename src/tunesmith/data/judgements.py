"""Lines that judge: a pair of answers, one answer that is good or bad, an answer whose steps are.

The formats are TRL's, and for steps Math-Shepherd's too. Pairs may leave the prompt out: then it is what both
answers, whole conversations or whole texts, begin with.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from tunesmith.data.formats import (
    COMPLETIONS,
    PROMPTS,
    Example,
    Format,
    Goal,
    asked,
    brief,
    check_named,
    check_unicode,
    context_of,
    found_columns,
    only_column,
    read_prompt,
    read_side,
    read_text,
    read_value,
    unread,
)
from tunesmith.data.sources import Row
from tunesmith.data.trie import common_length
from tunesmith.errors import nearest
from tunesmith.types import Message, Prompt

NEEDED = {
    "pairs": "'chosen' and 'rejected'",
    "judged": "a prompt, a completion and 'label'; or 'chosen' and 'rejected'",
    "steps": "a prompt, 'completions' (the steps) and 'labels'; or 'input' with separators and 'label'",
}
"""Columns of each goal's lines."""


def detect_judgement(row: Row, goal: Goal, prompt: str | None = None, completion: str | None = None) -> Format:
    """The format of a line for reward models and preferences; as ``formats.detect``."""
    check_named(row, prompt, completion)
    tags = next((name for name in ("label", "value") if name in row.columns), None)
    if goal == "steps" and prompt is None and tags and "input" in row.columns and "completions" not in row.columns:
        return Format("steps", text="input", completion=tags)
    asking = prompt or only_column(row, PROMPTS, "data.prompt")
    context = context_of(asking or "")
    if goal != "steps" and {"chosen", "rejected"} <= row.columns.keys() and completion is None:
        return Format("pairs", prompt=asking or "", context=context)
    answered = completion or (only_column(row, COMPLETIONS, "data.completion") if goal == "judged" else None)
    if goal == "judged" and asking and answered and "label" in row.columns:
        return Format("judged", prompt=asking, completion=answered, context=context)
    if goal == "steps" and asking and {"completions", "labels"} <= row.columns.keys():
        return Format("steps", prompt=asking, context=context)
    wanted = {"pairs": ("chosen", "rejected"), "judged": ("label",), "steps": ("completions", "labels")}[goal]
    close = next((c for name in wanted if name not in row.columns and "Did" in (c := nearest(name, row.columns))), "")
    missing = " and no ".join(name for name in wanted if name not in row.columns) or "prompt or completion"
    found = found_columns(row)
    raise row.bad(f"no {missing}; found columns: {found}; needs {NEEDED[goal]}.{close}".rstrip("."))


def convert_judgement(row: Row, form: Format) -> Example:
    """The line in one shape; as ``formats.convert``. BadLine also where nothing tells good from bad."""
    plain = unread(row)
    if form.kind == "pairs":
        prompt, chosen, rejected = _pair(row, form)
        return replace(plain, prompt=prompt, completion=chosen, rejected=rejected, margin=_margin(row))
    if form.kind == "steps" and form.text:
        tags = read_value(row, form.completion)
        if not isinstance(tags, str | list):
            raise row.bad(f"'{form.completion}' is {brief(tags)}, needs text or a list")
        text = read_text(row, form.text)
        return replace(plain, text=text, tags=tags)
    prompt = read_prompt(row, form)
    if form.kind == "judged":
        completion = read_side(row, form.completion)
        label = read_value(row, "label")
        if not isinstance(label, bool):
            raise row.bad(f"'label' is {brief(label)}, needs true (desirable) or false")
        return replace(plain, prompt=asked(prompt, completion), completion=completion, desirable=label)
    steps, labels = _steps(row), _labels(row)
    if len(steps) != len(labels):
        raise row.bad(f"{len(steps)} steps in 'completions' and {len(labels)} 'labels'; give one each")
    return replace(plain, prompt=prompt, steps=steps, labels=labels)


def _pair(row: Row, form: Format) -> tuple[Prompt, Prompt, Prompt]:
    """Prompt, chosen and rejected answer."""
    chosen, rejected = (read_side(row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise row.bad("'chosen' and 'rejected' are the same, so nothing is preferred")
    prompt = read_prompt(row, form) if form.prompt else None
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _talks(row, prompt, chosen, rejected)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise row.bad("one of 'chosen' and 'rejected' is text and the other a conversation")
    if prompt is None:
        at = common_length(chosen, rejected)
        # The border goes before a blank, so that no word is cut and the answers begin as they would be sampled.
        while at and not chosen[at - 1].isspace():
            at -= 1
        at = len(chosen[:at].rstrip())
        if not at:
            raise row.bad("there is no prompt, and 'chosen' and 'rejected' do not begin alike")
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise row.bad(f"'{name}' is empty")
    return prompt, chosen, rejected


def _talks(
    row: Row, prompt: Prompt | None, chosen: list[Message], rejected: list[Message]
) -> tuple[Prompt, Prompt, Prompt]:
    """Of conversations: answers to the prompt, or whole ones, which the prompt's column only repeats."""
    if prompt is None or chosen[0]["role"] != "assistant":
        alike = common_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise row.bad(f"'{name}' has no answer of its own: it is the beginning of the other")
        if answer[0]["role"] != "assistant":
            raise row.bad(
                f"'{name}' differs from the other in a turn of the {answer[0]['role']}; the two must answer one prompt"
            )
        said = (turn["content"].strip() or turn.get("tool_calls") for turn in answer if turn["role"] == "assistant")
        if not any(said):
            raise row.bad(f"'{name}' is empty")
    if not prompt:
        raise row.bad("there is no prompt before the answers in 'chosen' and 'rejected'")
    return asked(prompt, chosen), chosen, rejected


def _margin(row: Row) -> float:
    value = row.columns.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise row.bad(f"'margin' is {brief(value)}, needs a number")
    return float(value)


def _steps(row: Row) -> tuple[str, ...]:
    steps = read_value(row, "completions")
    if not isinstance(steps, list) or not steps:
        raise row.bad(f"'completions' is {brief(steps)}, needs a list of steps")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, str) or not step.strip():
            raise row.bad(f"step {number} of 'completions' is {brief(step)}, needs text")
        check_unicode(row, f"completions[{number - 1}]", step)
    return tuple(steps)


def _labels(row: Row) -> tuple[float, ...]:
    labels = read_value(row, "labels")
    if not isinstance(labels, list):
        raise row.bad(f"'labels' is {brief(labels)}, needs a list with a label for each step")
    for number, label in enumerate(labels, 1):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            reason = f"label {number} is {brief(label)}, needs true, false or a number from 0 to 1"
            raise row.bad(reason)
    return tuple(float(label) for label in labels)
