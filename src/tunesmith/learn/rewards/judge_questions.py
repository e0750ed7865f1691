"""What a judge is asked, and the verdicts in its answers.

Rubrics, criteria and templates are Jinja. They see ``prompt``, ``completion`` (pairs: ``first`` and
``second``), ``rubric``, ``criteria``, ``low`` and ``high``, ``mark``, and the columns of the data
line by their names. ``mark`` is a digest of the texts: a completion cannot guess it, so it cannot
close the tags around itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.judges import JudgeReward, names_text_file
from tunesmith.errors import ConfigError, RewardError, boundary, shortened
from tunesmith.learn.rewards.function import LARGEST_REWARD
from tunesmith.records.foreign import json_or
from tunesmith.types import Message, text_of_content

if TYPE_CHECKING:
    from jinja2 import Environment

Columns = Mapping[str, object]

_KNOWN = frozenset(
    {"prompt", "completion", "first", "second", "rubric", "criteria", "low", "high", "mark"}
)
NUMBER = r"(-?\d+(?:\.\d+)?)"
_BETWEEN = r"[\s:=*_\"'`]*"
_SCORE = re.compile(rf"\bscore{_BETWEEN}{NUMBER}", re.IGNORECASE)
_BETTER = re.compile(rf"\bbetter{_BETWEEN}(1|2|tie)\b", re.IGNORECASE)
_THOUGHT = re.compile(r"^.*</think>|<think>.*$", re.DOTALL)
"""Thinking, also where it does not end."""
_WEIGHTS = ("weight", "points")
_FIRST_WINS = {"1": 1.0, "a": 1.0, "2": 0.0, "b": 0.0, "tie": 0.5, "c": 0.5}


@dataclass(frozen=True, slots=True)
class Asked:
    """A criterion as a judge is asked it about one completion."""

    name: str
    text: str
    weight: float = 1.0


class JudgeQuestions:
    """The questions of one judge.

    Raises:
        ConfigError: a file is missing, or a text is not a Jinja template.
    """

    def __init__(self, entry: JudgeReward) -> None:
        self._entry = entry
        self._environment = _environment()
        self._template = _read(entry.template) or _usual(entry)
        self._rubric = _read(entry.rubric) or ""
        texts = [self._template, self._rubric, *(c.text for c in entry.named_criteria)]
        listed = {entry.criteria} if isinstance(entry.criteria, str) else frozenset[str]()
        self.columns = frozenset(name for text in texts for name in self._names(text)) | listed
        """The data columns that it reads."""

    def about(self, prompt: str, completion: str, columns: Columns) -> tuple[str, list[Asked]]:
        """The question about one completion, and its criteria; empty: one score.

        Raises:
            RewardError: a template needs what is missing, or the data line lists no criteria.
        """
        values = self._values(prompt, {"completion": completion}, columns)
        criteria = self._criteria(columns, values)
        return self._render(self._template, {**values, "criteria": criteria}), criteria

    def between(self, prompt: str, first: str, second: str, columns: Columns) -> str:
        """The question which of two completions is better. Raises RewardError as ``about``."""
        values = self._values(prompt, {"first": first, "second": second}, columns)
        return self._render(self._template, values)

    def _criteria(self, columns: Columns, values: Columns) -> list[Asked]:
        said = self._entry.criteria
        if not isinstance(said, str):
            return [Asked(c.name, self._render(c.text, values), c.weight) for c in said]
        value = columns.get(said)
        match json_or(value, None) if isinstance(value, str) else value:
            case [_, *_] as listed:
                found = [_criterion(str(number), one) for number, one in enumerate(listed, 1)]
            case _:
                raise RewardError(f"the column '{said}' lists no criteria")
        if not any(one.weight > 0 for one in found):
            raise RewardError(f"the column '{said}' has no criterion with a weight above 0")
        return found

    def _values(self, prompt: str, shown: Mapping[str, str], columns: Columns) -> Columns:
        """What templates see; ``shown`` are the completions."""
        low, high = self._entry.scale
        texts = "\0".join((prompt, *shown.values()))
        digest = hashlib.sha256(texts.encode(errors="replace")).hexdigest()
        values = {
            **columns,
            "prompt": prompt,
            "low": f"{low:g}",
            "high": f"{high:g}",
            "mark": digest[:8],
            **shown,
        }
        return {**values, "rubric": self._render(self._rubric, values)}

    def _names(self, text: str) -> set[str]:
        from jinja2 import TemplateError, meta

        with boundary(ConfigError, "reward.judge: not a Jinja template", TemplateError):
            parsed = self._environment.parse(text)
            self._environment.from_string(text)
        return meta.find_undeclared_variables(parsed) - _KNOWN

    def _render(self, text: str, values: Columns) -> str:
        from jinja2 import TemplateError

        with boundary(RewardError, "the judge's template", (TemplateError, TypeError, ValueError)):
            return self._environment.from_string(text).render(values).strip()


def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _usual(entry: JudgeReward) -> str:
    asked = "pairs" if entry.compare == "pairs" else "criteria" if entry.criteria else "scale"
    file = Path(__file__).with_name("templates") / "judge.jinja"
    return f'{{% set asked = "{asked}" %}}{file.read_text(encoding="utf-8")}'


def _read(said: str | None) -> str | None:
    if said is None or not names_text_file(said):
        return said
    with boundary(ConfigError, f"reward.judge: cannot read {said}", (OSError, ValueError)):
        text = Path(said).read_text(encoding="utf-8-sig")
    if not text.strip():
        raise ConfigError(f"reward.judge: {said} is empty", keys=("reward.judge",))
    return text


def _criterion(number: str, one: object) -> Asked:
    """A criterion of a data line: text, or a table as in published rubrics."""
    match one:
        case str():
            return Asked(number, one)
        case (
            {"text": str() as text, **rest}
            | {"criterion": str() as text, **rest}
            | {"description": str() as text, **rest}
        ):
            said = next((rest[key] for key in _WEIGHTS if rest.get(key) is not None), 1.0)
        case _:
            shown = shortened(repr(one))
            raise RewardError(f"criterion {number} is {shown}; expected text, or text and weight")
    try:
        weight = float(said)
    except (TypeError, ValueError, OverflowError):
        weight = nan
    if not abs(weight) <= LARGEST_REWARD:
        shown = shortened(repr(said))
        raise RewardError(f"criterion {number} has the weight {shown}; expected a number")
    return Asked(number, text, weight)


def transcript(messages: Sequence[Message]) -> str:
    """The text and the tool calls of one message, or of several after their roles."""
    if len(messages) == 1:
        return _said_in(messages[0])
    return "\n\n".join(f"{message['role']}: {_said_in(message)}" for message in messages)


def _said_in(message: Message) -> str:
    lines = [text_of_content(message.get("content"))]
    for call in message.get("tool_calls") or ():
        called = call.get("function", call)
        arguments = json.dumps(called.get("arguments"), ensure_ascii=False)
        lines.append(f"{called.get('name')}({arguments})")
    return "\n".join(filter(None, lines))


def score_in(answer: str, scale: tuple[float, float]) -> float:
    """The score as a share of the scale; RewardError if there is none, or it is outside."""
    answer = _THOUGHT.sub("", answer)
    found = _SCORE.findall(answer) or re.findall(rf"^\s*{NUMBER}(?:\s*/\s*\d+)?[\s.]*$", answer)
    return share_of(found[-1] if found else None, answer, scale)


def scores_in(answer: str, names: Sequence[str], scale: tuple[float, float]) -> list[float]:
    """One share of the scale per criterion; RewardError if one is missing or outside."""
    answer = _THOUGHT.sub("", answer)
    shares: list[float] = []
    for name in names:
        line = rf"^[^\w\n]*{re.escape(name)}{_BETWEEN}[:=]{_BETWEEN}{NUMBER}"
        found = re.findall(line, answer, re.IGNORECASE | re.MULTILINE)
        shares.append(share_of(found[-1] if found else None, answer, scale))
    return shares


def share_of(verdict: str | None, answer: str, scale: tuple[float, float]) -> float:
    """A number in an answer as a share of the scale."""
    low, high = scale
    try:
        number = float(verdict or "")
    except ValueError:
        raise RewardError(f"no number was found in the judge's answer: {_end_of(answer)}") from None
    if not low <= number <= high:
        raise RewardError(f"the judge gave {number:g} on a scale from {low:g} to {high:g}")
    return (number - low) / (high - low)


def winner_in(answer: str) -> float:
    """1 where the first completion is better, 0 where the second is, 0.5 for a tie."""
    answer = _THOUGHT.sub("", answer)
    found = _BETTER.findall(answer) or re.findall(r"^\W*(1|2|tie)\W*$", answer, re.IGNORECASE)
    return first_wins(found[-1] if found else None, answer)


def first_wins(verdict: str | None, answer: str) -> float:
    """A verdict on a pair as ``winner_in`` returns it."""
    won = _FIRST_WINS.get((verdict or "").strip().lower())
    if won is None:
        raise RewardError(f"no winner was found in the judge's answer: {_end_of(answer)}")
    return won


def _end_of(answer: str) -> str:
    words = " ".join(answer.split())
    return repr(words if len(words) <= 80 else f"…{words[-80:]}")
