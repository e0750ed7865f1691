"""The user's reward functions in a worker process: loaded once, then called as in the run's
process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config import objects as user_code
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.function import ItemFailure, Notes, RewardFunction, scores_from
from tunesmith.learn.rewards.loading import user_reward
from tunesmith.learn.usercode.calls import (
    Keywords,
    RaisedInCall,
    is_async,
    keywords_for,
    parameters_of,
)

Answer = dict[str, Any]
"""JSON values."""


class RewardProgram:
    """Called with a function's number and its arguments, always with ``completions``; returns an
    ``answer``.

    Coroutine functions are called by ``later``.
    """

    def __init__(self, references: Sequence[tuple[str, str]], base_dir: str) -> None:
        self.description: Answer
        try:
            functions = [user_code.load_function(e, Path(base_dir)) for _, e in references]
            pairs = zip(references, functions, strict=True)
            self._functions = [user_reward(*names, function) for names, function in pairs]
        except ConfigError as error:
            self.description = {"refused": str(error)}
            return
        self.description = {"functions": [_describe(f) for f in self._functions]}

    def __call__(self, number: int, keywords: Keywords) -> Answer:
        call, notes = self._call(number, keywords)
        try:
            return answer(call(), notes)
        except BaseException as error:
            return {"raised": RaisedInCall(error).trace}

    async def later(self, number: int, keywords: Keywords) -> Answer:
        call, notes = self._call(number, keywords)
        try:
            return answer(await call(), notes)
        except Exception as error:
            return {"raised": RaisedInCall(error).trace}

    def _call(self, number: int, keywords: Keywords) -> tuple[Callable[[], Any], Notes]:
        function = self._functions[number].function
        notes = Notes(len(keywords["completions"]))
        logs = {"log_extra": notes.log_extra, "log_metric": notes.log_metric}
        return partial(function, **keywords_for(function, {**keywords, **logs})), notes


def _describe(reward: RewardFunction) -> Answer:
    names = parameters_of(reward.function)
    return {
        "columns": sorted(reward.columns),
        "one_of": sorted(reward.one_of),
        "parameters": None if names is None else [*names, "completions"],
        "asynchronous": is_async(reward.function),
    }


def answer(output: object, notes: Notes) -> Answer:
    """The result of a call as JSON values: scores, failures by index, and logged values."""
    try:
        scores = scores_from(output, notes.size)
    except ValueError as error:
        return {"unusable": str(error)}
    failures = {i: s.reason for i, s in enumerate(scores) if isinstance(s, ItemFailure)}
    return {
        "scores": [None if isinstance(s, ItemFailure) else s for s in scores],
        "failures": list(failures.items()),
        "extras": notes.extras,
        "metrics": notes.metrics,
    }
