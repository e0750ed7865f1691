"""Selects among sampled and scored completions, and counts them: pure functions over lines."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import Any, cast

from tunesmith.records.wilson import wilson
from tunesmith.run.loop.evaluate import ROUNDING
from tunesmith.run.offline.lines import FLAT, LOGPROBS, Json, records_of
from tunesmith.types import Message, Prompt

WRITTEN = (*FLAT, *LOGPROBS, "completions")
OVERWRITTEN = {
    "best": WRITTEN,
    "pairs": (*WRITTEN, "chosen", "rejected", "chosen_reward", "rejected_reward"),
    "conditional": WRITTEN,
}
"""Data columns that a file of each kind cannot keep, because it has its own columns with these
names."""

Selected = list[Json] | str
"""The lines selected from a line, or the reason why there are none."""


def usable(line: Mapping[str, object]) -> list[Json]:
    """The completions that have a reward."""
    return [record for record in records_of(line) if record.get("reward") is not None]


def _columns(line: Mapping[str, object]) -> Json:
    """The columns of the data."""
    return {k: v for k, v in line.items() if k not in WRITTEN}


def best(line: Json, min_reward: float = -inf) -> Selected:
    """Best-of-n: the line with its highest-reward completion, the first if several are equal."""
    record = max(usable(line), key=lambda r: r["reward"], default=None)
    if record is None:
        return "without a reward"
    if record["reward"] < min_reward - ROUNDING:
        return "below min_reward"
    return [_columns(line) | record]


def pair(line: Json, min_margin: float, min_reward: float = -inf) -> Selected:
    """A preference pair for iterative DPO: the best completion against the worst."""
    records = usable(line)
    if len(records) < 2:
        return "without two rewards"
    chosen, rejected = (choose(records, key=lambda r: r["reward"]) for choose in (max, min))
    if not chosen["reward"] - rejected["reward"] > min_margin:
        return "tied"
    if chosen["reward"] < min_reward - ROUNDING:
        return "below min_reward"
    texts = {"chosen": chosen["completion"], "rejected": rejected["completion"]}
    rewards = {"chosen_reward": chosen["reward"], "rejected_reward": rejected["reward"]}
    return [_columns(line) | texts | rewards]


def conditional(line: Json, template: str, borders: Sequence[float] | None) -> Selected:
    """Conditional SFT: every completion, with its reward written into the prompt (OpenRLHF's
    ``csft``)."""
    selected: list[Json] = []
    for record in usable(line):
        reward = record["reward"]
        word = f"{reward:.2f}" if borders is None else str(level(reward, borders))
        prompt = _with_reward(line["prompt"], template, word)
        columns = {"prompt": prompt, "completion": record["completion"], "reward": reward}
        selected.append(_columns(line) | columns)
    return selected or "without a reward"


def _with_reward(prompt: Prompt, template: str, word: str) -> Prompt:
    """The prompt, or the last user message of a conversation, put into the template."""
    if isinstance(prompt, str):
        # The prompt is inserted last, because it may contain "{reward}".
        return template.replace("{reward}", word).replace("{prompt}", prompt)
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=len(prompt) - 1)
    content = _with_reward(cast("str", prompt[last]["content"]), template, word)
    changed: Message = {**prompt[last], "content": content}
    return [*prompt[:last], changed, *prompt[last + 1 :]]


def level_borders(rewards: Sequence[float], levels: int) -> list[float]:
    """The highest reward of each level but the last; all levels hold about the same number of
    rewards."""
    ordered = sorted(rewards)
    if not ordered:
        return []
    return [ordered[ceil(len(ordered) * k / levels) - 1] for k in range(1, levels)]


def level(reward: float, borders: Sequence[float]) -> int:
    """The level of a reward, from 1; equal rewards have the same level."""
    return bisect_left(borders, reward) + 1


def right_answers(line: Mapping[str, object], threshold: float) -> list[Json]:
    """Completions that reach the threshold, also those that were cut off."""
    return [record for record in usable(line) if record["reward"] >= threshold - ROUNDING]


def correct_answers(line: Mapping[str, object], threshold: float) -> list[Json]:
    """Completions that reach the threshold and are complete."""
    return [r for r in right_answers(line, threshold) if r.get("finish_reason") == "stop"]


def select(records: Sequence[Json], rule: str) -> list[Json]:
    """The correct answers to a question that are used for training; no text occurs twice.

    ``distinct`` keeps the first answer of each reasoning path (Yuan et al. 2023, arXiv:2308.01825,
    section 3.2).
    """
    unique = _firsts(records, lambda r: r["completion"])
    match rule:
        case "first":
            return unique[:1]
        case "shortest":
            return sorted(unique, key=lambda r: r["tokens"])[:1]
        case "distinct":
            return _firsts(unique, lambda r: reasoning_path(r["completion"]))
        case _:
            return unique


def _firsts(records: Sequence[Json], key: Callable[[Json], Hashable]) -> list[Json]:
    """The first record of each key."""
    firsts: dict[Hashable, Json] = {}
    for record in records:
        firsts.setdefault(key(record), record)
    return list(firsts.values())


_OPERATORS = "+-*/×÷^"
_LEFT = " \t0123456789.,()$%" + _OPERATORS
_RIGHT = " \t0123456789.,$%-"
_NOISE = str.maketrans({"×": "*", "÷": "/", **dict.fromkeys(" \t,$")})


def reasoning_path(text: str) -> tuple[str, ...]:
    """The equations of a text in order, without blanks and currency signs; if there are none, its
    words.

    Example:
        >>> reasoning_path("He has 3 × 4 = 12 and then 12+1=13 apples.")
        ('3*4=12', '12+1=13')
    """
    equations: list[str] = []
    for before, after in pairwise(text.split("=")):
        left = before[len(before.rstrip(_LEFT)) :].translate(_NOISE)
        right = after[: len(after) - len(after.lstrip(_RIGHT))].translate(_NOISE).rstrip(".-")
        if any(c.isdigit() for c in left) and any(c in _OPERATORS for c in left[1:]) and right:
            equations.append(f"{left}={right}")
    return tuple(equations) or tuple(text.lower().split())


@dataclass(slots=True)
class Yield:
    """Counts the samples of all questions."""

    samples_per_question: int
    totals: Counter[str] = field(default_factory=Counter[str])
    """The totals in ``report``, and of ``judged`` samples, whose reward tells whether they have an
    answer."""
    answered: float = 0.0
    histogram: Counter[int] = field(default_factory=Counter[int])
    """Questions by their number of correct samples."""

    def add(self, line: Mapping[str, object], correct: int, kept: int) -> Json:
        """Count the samples of a question. Returns its line of the report."""
        records = records_of(line)
        known = answered_of(records)
        counts = {"samples": len(records), "correct": correct, "kept": kept}
        failed = sum("error" in record for record in records)
        self.totals.update(counts, questions=1, judged=len(known), failed=failed)
        self.totals["solved"] += correct > 0
        self.answered += sum(known)
        self.histogram[correct] += 1
        return {"prompt": line["prompt"], **counts}

    def report(self) -> Json:
        totals = self.totals
        most = max(self.samples_per_question, *self.histogram)  # another run may have more answers
        names = ("questions", "solved", "samples", "correct", "failed", "kept")
        return {
            **{name: totals[name] for name in names},
            "solved_share": interval(totals["solved"], totals["questions"]),
            "correct_share": interval(totals["correct"], totals["samples"]),
            "answered_share": interval(round(self.answered), totals["judged"]),
            "questions_by_correct_samples": {str(n): self.histogram[n] for n in range(most + 1)},
        }


def answered_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """1.0 or 0.0 for each completion whose reward tells whether it has an answer."""
    return [r["metrics"]["answered"] for r in records if "answered" in (r.get("metrics") or {})]


def interval(hits: int, total: int) -> list[float] | None:
    """``[share, low, high]``: a share and its 95% interval (``wilson``); None of nothing."""
    if total == 0:
        return None
    return [hits / total, *wilson(hits / total, total)]


def accuracy(lines: Iterable[Json], threshold: float) -> Json:
    """Shares, with their 95% intervals, of an evaluation with one completion per line.

    A missing answer is not a wrong answer: ``answered`` is the share of completions with an answer,
    and ``accuracy_of_answered`` the accuracy among those. A failed completion is neither answered
    nor correct.
    """
    lines = list(lines)
    records = [record for line in lines for record in records_of(line)]
    correct = [record for line in lines for record in right_answers(line, threshold)]
    judged = answered_of(records)
    answered = sum(value > 0 for value in judged)
    right = sum(value > 0 for value in answered_of(correct))
    return {
        "questions": len(records),
        "accuracy": interval(len(correct), len(records)),
        "answered": interval(answered, len(records)) if judged else None,
        "accuracy_of_answered": interval(right, answered),
        "failed": sum("error" in record for record in records),
    }
