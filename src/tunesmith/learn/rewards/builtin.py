"""Built-in rewards: exact_match, numeric_match, regex_format and math.

All but regex_format compare with the answer column. They log ``answered`` (the completion has an
answer at all) and ``correct``, which separates "no answer" from "wrong". For a task without an
answer the reward does not apply.
"""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError, DeadlineExceeded
from tunesmith.learn.rewards.function import (
    RESERVED,
    ItemFailure,
    Notes,
    RewardFunction,
    Score,
    completions_of,
    text_of,
)
from tunesmith.learn.rewards.numeric import equal, last_number
from tunesmith.learn.usercode.killable import Pool, UserProgram, WorkerError
from tunesmith.plan.facts.hardware import usable_cpus
from tunesmith.types import Rollout, Status

ITEM_SECONDS = 5.0
"""Upper limit of the deadline for judging one completion in a worker process; ``reward.timeout`` if
shorter."""

BAD_GOLD = "data error in the answer column"
Verdict = bool | None | ItemFailure
"""Whether an answer is correct; None: the completion has no answer."""
Judge = Callable[[list[str], list[str]], Awaitable[list[Verdict]]]
"""Maps completions and their gold answers to verdicts."""


def check_builtins(section: RewardSection) -> None:
    """Reject (ConfigError) settings that the built-ins in use cannot work with, or that none of
    them reads."""
    used = [name for name in section.functions if name in BUILTINS]
    problem = _problem_of_pattern(section.pattern, used)
    if problem:
        raise ConfigError(f"reward.pattern {problem}", keys=("reward.pattern",))
    if section.answer in RESERVED:
        raise ConfigError(
            f"reward.answer: '{section.answer}' is not a data column but an argument of every "
            "reward.",
            keys=("reward.answer",),
        )
    for key in ("tests", "partial_credit"):
        if key in section.model_fields_set and "code_tests" not in section.functions:
            why = f"reward.{key} is set, but code_tests is not in reward.functions."
            raise ConfigError(why, keys=(f"reward.{key}", "reward.functions"))
    labelled = any(entry.protocol == "openrlhf" for entry in section.remote)
    read = labelled or not set(COMPARING).isdisjoint(used)
    if "answer" in section.model_fields_set and not read:
        raise ConfigError(
            f"reward.answer is set, but none of {', '.join(COMPARING)} is in reward.functions; "
            "your own functions get every column by its name.",
            keys=("reward.answer", "reward.functions"),
        )


def _problem_of_pattern(pattern: str | None, used: Sequence[str]) -> str | None:
    if pattern is None:
        missing = "is missing; regex_format gives 1 where it matches a whole completion."
        return missing if "regex_format" in used else None
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"is not a regular expression: {error}: {pattern!r}"
    if "regex_format" in used:
        return None
    extracting = [name for name in used if name in ("exact_match", "numeric_match")]
    if not extracting:
        unread = "is set, but regex_format, exact_match and numeric_match are not in"
        return f"{unread} reward.functions."
    without = f"has no group for {extracting[0]} to extract; put parentheses around the answer"
    return None if groups else f"{without}, as in '#### (.+)'."


def _matching(
    section: RewardSection, name: str, read: Callable[[str], Any], same: Callable[[Any, Any], bool]
) -> RewardFunction:
    """1 where what ``read`` extracts from completion and answer is the ``same``.

    A pattern with a group selects the part of the completion to read.
    """
    pattern = section.pattern
    extracts = bool(pattern and re.compile(pattern).groups)
    pool = _pool("pattern_program.py", "extract", section) if extracts else None

    def verdict(text: str | ItemFailure | None, gold: str) -> Verdict:
        expected = read(gold)
        if expected is None:
            return _bad_gold(f"{gold!r} holds no number")
        if isinstance(text, ItemFailure):
            return text
        answer = None if text is None else read(text)
        return same(answer, expected) if answer else None

    async def judge(texts: list[str], golds: list[str]) -> list[Verdict]:
        parts = await _gather(pool.run(pattern, text) for text in texts) if pool else texts
        return list(map(verdict, parts, golds))

    def problem(gold: object) -> str | None:
        unread = f"{gold!r} holds no number" if read(str(gold)) is None else None
        return _gold_problem(gold) or unread

    return _comparing(name, section, judge, problem, pool)


def _regex_format(section: RewardSection) -> RewardFunction:
    """1 where the pattern matches the whole completion (write ``(?s)`` to let ``.`` match
    newlines)."""
    pool = _pool("pattern_program.py", "matches", section)

    async def regex_format(
        rollouts: Sequence[Rollout], texts: Sequence[str], _: Notes
    ) -> list[Score]:
        completions = map(text_of, completions_of(rollouts, texts))
        return await _gather(pool.run(section.pattern, text) for text in completions)

    name = "regex_format"
    return RewardFunction(name, name, regex_format, builtin=True, close=pool.close)


def _math(section: RewardSection) -> RewardFunction:
    """1 where math-verify judges the completion's answer equal to the answer column's."""
    workers = max(1, min(4, usable_cpus() // 2))
    pool = _pool("math_program.py", "judge", section, workers)

    def verdict(judged: dict[str, bool] | ItemFailure, gold: str) -> Verdict:
        if isinstance(judged, ItemFailure):
            return judged
        if not judged["gold"]:
            return _bad_gold(f"math-verify cannot parse {gold!r}")
        return judged["correct"] if judged["answered"] else None

    async def judge(texts: list[str], golds: list[str]) -> list[Verdict]:
        return list(map(verdict, await _gather(map(pool.run, golds, texts)), golds))

    return _comparing("math", section, judge, _gold_problem, pool)


def _comparing(
    name: str,
    section: RewardSection,
    judge: Judge,
    check_gold: Callable[[object], str | None],
    pool: Pool | None,
) -> RewardFunction:
    """A reward that compares with the answer column. Only tasks that have an answer are judged."""

    async def score(rollouts: Sequence[Rollout], texts: Sequence[str], notes: Notes) -> list[Score]:
        golds = [r.task.columns.get(section.answer) for r in rollouts]
        completions = [text_of(c) for c in completions_of(rollouts, texts)]
        judged = [i for i, gold in enumerate(golds) if gold is not None]
        scores: list[Score] = [None] * len(golds)
        answered: list[float | None] = [None] * len(golds)
        verdicts = await judge([completions[i] for i in judged], [str(golds[i]) for i in judged])
        for i, verdict in zip(judged, verdicts, strict=True):
            if isinstance(verdict, ItemFailure):
                scores[i] = verdict
            else:
                scores[i] = float(bool(verdict))
                answered[i] = float(verdict is not None)
        notes.log_extra("answered", answered)
        notes.log_extra("correct", [s if isinstance(s, float) else None for s in scores])
        return scores

    return RewardFunction(
        name,
        name,
        score,
        builtin=True,
        columns=frozenset({section.answer}),
        close=pool.close if pool else lambda: None,
        check_gold=check_gold,
    )


def _pool(program: str, function: str, section: RewardSection, workers: int = 1) -> Pool:
    code = UserProgram(Path(__file__).with_name(program), function)
    return Pool(code, min(section.timeout, ITEM_SECONDS), workers)


async def _gather(jobs: Iterable[Awaitable[Any]]) -> list[Any]:
    """Results of the workers' jobs; an ``ItemFailure`` for each job that was killed or raised."""

    async def result(job: Awaitable[Any]) -> Any:
        try:
            return await job
        except DeadlineExceeded as error:
            return ItemFailure(Status.TIMED_OUT, str(error))
        except WorkerError as error:
            return ItemFailure(Status.REWARD_FAILED, str(error))

    return await asyncio.gather(*map(result, jobs))


def _bad_gold(why: str) -> ItemFailure:
    return ItemFailure(Status.REWARD_FAILED, f"{BAD_GOLD}: {why}")


def _gold_problem(gold: object) -> str | None:
    if gold is None:
        return "is missing"
    if not isinstance(gold, str | int | float):
        return f"{gold!r} is of type {type(gold).__name__}; expected text or a number"
    return None if str(gold).strip() else "is empty"


BUILTINS: dict[str, Callable[[RewardSection], RewardFunction]] = {
    # White space is collapsed.
    "exact_match": partial(
        _matching, name="exact_match", read=lambda text: " ".join(text.split()), same=operator.eq
    ),
    "numeric_match": partial(_matching, name="numeric_match", read=last_number, same=equal),
    "regex_format": _regex_format,
    "math": _math,
}
COMPARING = ("exact_match", "numeric_match", "math")
