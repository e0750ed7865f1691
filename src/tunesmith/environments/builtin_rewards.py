"""Built-in rewards: exact_match, numeric_match, regex_format and math.

Each is made from the ``[reward]`` section and has the signature of any other reward function. All but
regex_format compare with the answer column and log ``answered`` (the completion holds an answer at all) and
``correct``, so that "no answer" and "wrong" can be told apart. A task without an answer gets None: the
reward does not apply.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RewardSection
from tunesmith.environments.killable import KillablePool, Program, WorkerError
from tunesmith.environments.numeric import Number, equal, last_number
from tunesmith.environments.reward_types import RESERVED, ItemFailure, RewardFunction, Score, text_of
from tunesmith.errors import ConfigError, DeadlineExceeded
from tunesmith.types import Status

ITEM_SECONDS = 5.0
"""Most that judging one completion may take in a worker process, when ``reward.timeout`` is longer."""

LogExtra = Callable[[str, Sequence[Any]], None]
_HERE = Path(__file__).parent
_FAILURES = (DeadlineExceeded, WorkerError)


def check_builtins(section: RewardSection) -> None:
    """Refuse settings that the built-ins in use cannot work with, or that none of them reads.

    Raises:
        ConfigError: says which key, and what would be right.
    """
    used = [name for name in section.functions if name in BUILTINS]
    extracting = [name for name in used if name in ("exact_match", "numeric_match")]
    if section.pattern is None:
        if "regex_format" in used:
            raise ConfigError("reward.pattern is missing; regex_format gives 1 where it matches a whole completion.")
    else:
        groups = _groups(section.pattern)
        if "regex_format" not in used and not extracting:
            raise ConfigError("reward.pattern is set, but regex_format, exact_match and numeric_match are not used.")
        if "regex_format" not in used and not groups:
            raise ConfigError(
                f"reward.pattern has no group for {extracting[0]} to extract; "
                "put parentheses around the answer, as in '#### (.+)'."
            )
    if section.answer in RESERVED:
        raise ConfigError(f"reward.answer: '{section.answer}' is not a data column but an argument of every reward.")
    labelled = any(entry.protocol == "openrlhf" for entry in section.remote)
    if "answer" in section.model_fields_set and not labelled and not any(name in COMPARING for name in used):
        raise ConfigError(
            f"reward.answer is set, but none of {', '.join(COMPARING)} is in reward.functions; "
            "your own functions get every column by its name."
        )
    if "math" in used and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("the built-in reward 'math' needs a package: pip install math-verify.")


def make_builtin(name: str, section: RewardSection) -> RewardFunction:
    """The built-in of this name, set up by the section."""
    return BUILTINS[name](section)


def _groups(pattern: str) -> int:
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"reward.pattern is not a regular expression: {error}: {pattern!r}") from error


def _exact_match(section: RewardSection) -> RewardFunction:
    """1 where completion and answer are equal but for whitespace at the ends and its amount inside."""
    extractor = _Extractor(section)

    async def exact_match(completions: Sequence[Any], log_extra: LogExtra, **columns: Sequence[Any]) -> list[Score]:
        golds = columns[section.answer]
        found = await extractor.extract(completions, golds)
        answers = [" ".join(f.split()) if isinstance(f, str) else f for f in found]
        expected = [None if gold is None else " ".join(str(gold).split()) for gold in golds]
        return _judged(golds, [a or None for a in answers], lambda i: answers[i] == expected[i], log_extra)

    return _comparing("exact_match", section, exact_match, _gold_problem, extractor.close)


def _numeric_match(section: RewardSection) -> RewardFunction:
    """1 where the last number of the completion (or of what the pattern extracts) equals the answer's."""
    extractor = _Extractor(section)

    async def numeric_match(completions: Sequence[Any], log_extra: LogExtra, **columns: Sequence[Any]) -> list[Score]:
        golds = columns[section.answer]
        found = await extractor.extract(completions, golds)
        answers = [last_number(f) if isinstance(f, str) else f for f in found]
        expected = [None if gold is None else last_number(str(gold)) for gold in golds]

        def correct(i: int) -> bool:
            answer, gold = answers[i], expected[i]
            return isinstance(answer, Number) and gold is not None and equal(answer, gold)

        scores = _judged(golds, answers, correct, log_extra)
        return [
            score if gold is None or want is not None else _bad_gold(f"{gold!r} holds no number")
            for score, gold, want in zip(scores, golds, expected, strict=True)
        ]

    def problem(gold: Any) -> str | None:
        return _gold_problem(gold) or (None if last_number(str(gold)) else f"{gold!r} holds no number")

    return _comparing("numeric_match", section, numeric_match, problem, extractor.close)


def _regex_format(section: RewardSection) -> RewardFunction:
    """1 where the pattern matches the whole completion (write ``(?s)`` to let ``.`` match newlines)."""
    pattern = section.pattern or ""
    pool = _pattern_pool(section, "matches")

    async def regex_format(completions: Sequence[Any]) -> list[Score]:
        jobs = [pool.submit(pattern, text_of(completion)) for completion in completions]
        outcomes = await _gather(jobs)
        return [o if isinstance(o, ItemFailure) else float(o) for o in outcomes]

    accepts = frozenset({"completions"})
    return RewardFunction("regex_format", "regex_format", regex_format, frozenset(), accepts, True, pool.close)


def _math(section: RewardSection) -> RewardFunction:
    """1 where math-verify finds the completion's answer equal to the answer column's."""
    program = Program(_HERE / "math_program.py", "judge", min(section.timeout, ITEM_SECONDS))
    pool = KillablePool(program, workers=max(1, min(4, (os.cpu_count() or 1) // 2)))

    async def math(completions: Sequence[Any], log_extra: LogExtra, **columns: Sequence[Any]) -> list[Score]:
        golds = columns[section.answer]
        asked = [i for i, gold in enumerate(golds) if gold is not None]
        jobs = [pool.submit(str(golds[i]), text_of(completions[i])) for i in asked]
        verdicts: dict[int, Any] = dict(zip(asked, await _gather(jobs), strict=True))
        for i, verdict in verdicts.items():
            if not isinstance(verdict, ItemFailure) and not verdict["gold"]:
                verdicts[i] = _bad_gold(f"math-verify cannot parse {golds[i]!r}")
        answers = [
            v if isinstance(v, ItemFailure) else (v["answered"] or None) if v else None
            for v in map(verdicts.get, range(len(golds)))
        ]
        return _judged(golds, answers, lambda i: verdicts[i]["correct"], log_extra)

    return _comparing("math", section, math, _gold_problem, pool.close)


def _comparing(
    name: str,
    section: RewardSection,
    function: Callable[..., Any],
    check_gold: Callable[[Any], str | None],
    close: Callable[[], None],
) -> RewardFunction:
    return RewardFunction(
        name=name,
        reference=name,
        function=function,
        columns=frozenset({section.answer}),
        accepts=frozenset({"completions", "log_extra", section.answer}),
        builtin=True,
        close=close,
        check_gold=check_gold,
    )


def _judged(
    golds: Sequence[Any], answers: Sequence[Any], correct: Callable[[int], bool], log_extra: LogExtra
) -> list[Score]:
    """Scores of a comparing reward: ``answers[i]`` is an answer, None (there is none) or a failure."""
    scores: list[Score] = []
    answered: list[float | None] = []
    for i, (gold, answer) in enumerate(zip(golds, answers, strict=True)):
        failed = isinstance(answer, ItemFailure)
        applies = gold is not None and not failed
        answered.append(float(answer is not None) if applies else None)
        if failed:
            scores.append(answer)
        else:
            scores.append(float(answer is not None and correct(i)) if applies else None)
    log_extra("answered", answered)
    log_extra("correct", [s if isinstance(s, float) else None for s in scores])
    return scores


class _Extractor:
    """Gives what the pattern's group captures, in a worker process; without a group, the whole completion."""

    def __init__(self, section: RewardSection) -> None:
        self._pattern = section.pattern if section.pattern is not None and _groups(section.pattern) else None
        self._pool = _pattern_pool(section, "extract") if self._pattern is not None else None

    async def extract(self, completions: Sequence[Any], golds: Sequence[Any]) -> list[str | ItemFailure | None]:
        texts = [text_of(completion) for completion in completions]
        if self._pool is None:
            return list(texts)
        asked = [i for i, gold in enumerate(golds) if gold is not None]
        found = await _gather([self._pool.submit(self._pattern, texts[i]) for i in asked])
        by_index: dict[int, str | ItemFailure | None] = dict(zip(asked, found, strict=True))
        return [by_index.get(i) for i in range(len(texts))]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _pattern_pool(section: RewardSection, function: str) -> KillablePool:
    return KillablePool(Program(_HERE / "pattern_program.py", function, min(section.timeout, ITEM_SECONDS)))


async def _gather(jobs: Sequence[Future[Any]]) -> list[Any]:
    """Results of the worker's jobs, an ``ItemFailure`` for each that was killed or raised."""
    outcomes = await asyncio.gather(*map(asyncio.wrap_future, jobs), return_exceptions=True)
    return [_failure(o) if isinstance(o, BaseException) else o for o in outcomes]


def _failure(error: BaseException) -> ItemFailure:
    if not isinstance(error, _FAILURES):
        raise error
    status = Status.TIMED_OUT if isinstance(error, DeadlineExceeded) else Status.REWARD_FAILED
    return ItemFailure(status, str(error))


def _bad_gold(reason: str) -> ItemFailure:
    return ItemFailure(Status.REWARD_FAILED, f"data error in the answer column: {reason}")


def _gold_problem(gold: Any) -> str | None:
    if gold is None:
        return "is missing"
    if not isinstance(gold, str | int | float):
        return f"{gold!r} is of type {type(gold).__name__}; expected text or a number"
    return None if str(gold).strip() else "is empty"


BUILTINS: dict[str, Callable[[RewardSection], RewardFunction]] = {
    "exact_match": _exact_match,
    "numeric_match": _numeric_match,
    "regex_format": _regex_format,
    "math": _math,
}
COMPARING = ("exact_match", "numeric_match", "math")
