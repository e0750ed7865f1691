"""Reward functions written for other frameworks: verl's run as they are, of others it is said what maps to what."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunesmith.rewards.base import RESERVED, text_of
from tunesmith.usercode.calls import is_async, taken

VERL = frozenset({"solution_str", "ground_truth"})
"""Arguments by which a function is known as verl's ``compute_score``."""
VERL_GOLD = frozenset({"reward_model", "ground_truth"})
"""Columns of which its data has one: ``reward_model`` is a table with ``ground_truth`` inside, as in verl's files."""

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("completion", "response", "responses", "output", "outputs", "answers"), "completions"),
    **dict.fromkeys(("solution_str", "solution_strs", "predictions", "generated_texts"), "completions"),
    "prompt": "prompts",
    "question_str": "prompts",
    "queries": "prompts and completions",
    "labels": "a column's own name, such as answer",
    "ground_truth": "a column's own name, such as answer",
    "ground_truths": "a column's own name, such as answer",
    "data_sources": "the column data_source",
    "extra_infos": "the column extra_info",
}
"""Arguments of other frameworks' functions, and what has their place here."""


def hint(name: str) -> str:
    """A clause for an argument that the data has no column for; empty where nothing is known about it."""
    instead = INSTEAD.get(name)
    if instead is None:
        return ""
    return f" What other code calls '{name}' is here {instead}, a list with one entry per completion."


def is_verl(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).parameters.keys() >= VERL


def from_verl(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function that calls verl's once per completion, as its reward manager does.

    ``solution_str`` is the completion's text, ``ground_truth`` that of the column ``reward_model`` (else the column of
    this name), ``data_source`` and ``extra_info`` are columns. The result is a number, or a table: its ``score`` is the
    reward, the rest is logged.
    """

    def calls(completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for i, completion in enumerate(completions):
            row = {name: values[i] for name, values in columns.items() if name not in RESERVED}
            judged = row.get("reward_model")
            gold = judged.get("ground_truth") if isinstance(judged, Mapping) else row.get("ground_truth")
            own = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info") or {}}
            made.append(taken(function, {**row, **own, "solution_str": text_of(completion), "ground_truth": gold}))
        return made

    def scores(found: Sequence[Any], log_extra: Callable[[str, list[Any]], None]) -> list[Any]:
        tables = [value if isinstance(value, Mapping) else {"score": value} for value in found]
        for name in dict.fromkeys(name for table in tables for name in table if name != "score"):
            log_extra(name, [table.get(name) for table in tables])
        return [table.get("score") for table in tables]

    if is_async(function):

        async def judged(completions: Sequence[Any], log_extra: Any, **columns: Any) -> list[Any]:
            found = await asyncio.gather(*(function(**call) for call in calls(completions, columns)))
            return scores(found, log_extra)

        return judged

    def judge(completions: Sequence[Any], log_extra: Any, **columns: Any) -> list[Any]:
        return scores([function(**call) for call in calls(completions, columns)], log_extra)

    return judge
