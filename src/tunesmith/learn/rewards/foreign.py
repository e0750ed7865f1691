"""Reward functions written for other frameworks: verl's run unchanged; others get hints about the
names used here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunesmith.learn.rewards.function import RESERVED, text_of
from tunesmith.learn.usercode.calls import Function, is_async, keywords_for

VERL = frozenset({"solution_str", "ground_truth"})
"""The arguments that mark a function as verl's ``compute_score``."""
VERL_GOLD = frozenset({"reward_model", "ground_truth"})
"""verl's function needs one of these columns. ``reward_model`` is a table with ``ground_truth``, as
in verl's files."""

_COMPLETIONS = (
    "completion", "response", "responses", "output", "outputs", "answers", "solution_str",
    "solution_strs", "predictions", "generated_texts",
)  # fmt: skip
_GOLD = ("labels", "ground_truth", "ground_truths")
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(_COMPLETIONS, "completions"),
    **dict.fromkeys(_GOLD, "a column's own name, such as answer"),
    "prompt": "prompts",
    "question_str": "prompts",
    "queries": "prompts and completions",
    "data_sources": "the column data_source",
    "extra_infos": "the column extra_info",
}
"""Arguments of other frameworks' functions, and their names here."""


def hint(name: str) -> str:
    """A hint for an argument that is not a column of the data; empty for an unknown argument."""
    called = f"is called {INSTEAD.get(name)} here: a list with one entry per completion"
    return f" Other code's '{name}' {called}." if name in INSTEAD else ""


def from_verl(function: Function) -> Function:
    """A reward function that calls verl's function once per completion, as verl's reward manager
    does.

    ``solution_str`` is the completion's text; ``ground_truth`` comes from the column
    ``reward_model``, else from the column ``ground_truth``; ``data_source`` and ``extra_info`` are
    columns. The result is a number, or a table whose ``score`` is the reward and whose other
    entries are logged.
    """

    def keywords(
        completions: Sequence[object], columns: Mapping[str, Sequence[Any]]
    ) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for i, completion in enumerate(completions):
            row = {name: values[i] for name, values in columns.items() if name not in RESERVED}
            nested = row.get("reward_model")
            gold = (nested if isinstance(nested, Mapping) else row).get("ground_truth")
            own = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info") or {}}
            asked = {"solution_str": text_of(completion), "ground_truth": gold}
            calls.append(keywords_for(function, {**row, **own, **asked}))
        return calls

    def scores(results: Sequence[object], log_extra: Callable[[str, list[Any]], None]) -> list[Any]:
        tables = [value if isinstance(value, Mapping) else {"score": value} for value in results]
        for name in dict.fromkeys(name for table in tables for name in table if name != "score"):
            log_extra(name, [table.get(name) for table in tables])
        return [table.get("score") for table in tables]

    if is_async(function):

        async def reward_async(
            completions: Sequence[object], log_extra: Any, **columns: Any
        ) -> list[Any]:
            calls = (function(**call) for call in keywords(completions, columns))
            return scores(await asyncio.gather(*calls), log_extra)

        return reward_async

    def reward(completions: Sequence[object], log_extra: Any, **columns: Any) -> list[Any]:
        return scores([function(**call) for call in keywords(completions, columns)], log_extra)

    return reward
