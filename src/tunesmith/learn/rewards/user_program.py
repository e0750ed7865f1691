"""The user's reward functions in a worker process: loaded once, then called as in the run's
process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config import objects as user_code
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.function import ItemFailure, Notes, scores_from
from tunesmith.learn.rewards.loading import user_reward
from tunesmith.learn.usercode.calls import RaisedInCall, accepted, is_async, parameters_of


class RewardProgram:
    """Called with a function's number and its arguments, always with ``completions``; returns an
    ``answer``.

    Coroutine functions are called by ``later``.
    """

    def __init__(self, references: Sequence[tuple[str, str]], base_dir: str) -> None:
        self.description: dict[str, Any]
        try:
            loaded = [
                (name, entry, user_code.load_function(entry, Path(base_dir)))
                for name, entry in references
            ]
            self._functions = [
                user_reward(name, entry, function) for name, entry, function in loaded
            ]
        except ConfigError as error:
            self.description = {"refused": str(error)}
            return
        self.description = {
            "functions": [
                {
                    "columns": sorted(f.columns),
                    "one_of": sorted(f.one_of),
                    "parameters": None
                    if (names := parameters_of(f.function)) is None
                    else [*names, "completions"],
                    "asynchronous": is_async(f.function),
                }
                for f in self._functions
            ]
        }

    def __call__(self, number: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
        notes = Notes(len(keywords["completions"]))
        try:
            return answer(self._function(number, keywords, notes)(), notes)
        except BaseException as error:
            return {"raised": RaisedInCall(error).trace}

    async def later(self, number: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
        notes = Notes(len(keywords["completions"]))
        try:
            return answer(await self._function(number, keywords, notes)(), notes)
        except Exception as error:
            return {"raised": RaisedInCall(error).trace}

    def _function(
        self, number: int, keywords: Mapping[str, Any], notes: Notes
    ) -> Callable[[], Any]:
        function = self._functions[number].function
        logs = {"log_extra": notes.log_extra, "log_metric": notes.log_metric}
        return partial(function, **accepted(function, {**keywords, **logs}))


def answer(output: object, notes: Notes) -> dict[str, Any]:
    """The result of a call as JSON values: scores, failures by index, and logged values."""
    try:
        scores = scores_from(output, notes.size)
    except ValueError as error:
        return {"unusable": str(error)}
    failures = {i: s.reason for i, s in enumerate(scores) if isinstance(s, ItemFailure)}
    numbers = [None if isinstance(s, ItemFailure) else s for s in scores]
    return {
        "scores": numbers,
        "failures": list(failures.items()),
        "extras": notes.extras,
        "metrics": notes.metrics,
    }
