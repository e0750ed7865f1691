"""Applies the rules to a run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tunesmith.doctor.record import RunRecord
from tunesmith.doctor.signs import last_steps, signs
from tunesmith.monitor.learning import at_the_end
from tunesmith.plan.rules.rules import applies

Severity = Literal["problem", "warning", "note"]
SEVERITIES: Sequence[Severity] = ("problem", "warning", "note")
LEARNED = 0.2
"""Rise of the reward, in standard deviations, above which a run has learned something."""
_PLACE = re.compile(r"\{([^{}*:]+)(?:\*([\d.]+))?(?::([^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class Finding:
    """``change`` holds settings to write, ``key = value``; ``effect`` describes their effect."""

    key: str
    severity: Severity
    numbers: str
    cause: str
    change: tuple[str, ...]
    effect: str
    steps: str
    """The steps that the numbers cover."""


def diagnose(record: RunRecord) -> list[Finding]:
    """A run's findings, the worst first. Findings that another one explains are left out."""
    last = last_steps(record)
    values: dict[str, Any] = signs(record) | {"last_steps": last}
    rose = values.get("reward.rise_in_stds", 0.0) > LEARNED
    found = [
        *_nothing_learned(record, last, rose),
        *(_finding(rule, values) for rule in rules() if applies(rule, values)),
    ]
    each = {finding.key: finding for finding in reversed(found)}
    explained = {key for cause, others in explains().items() if cause in each for key in others}
    kept = [finding for key, finding in reversed(each.items()) if key not in explained]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))


def rules() -> list[dict[str, Any]]:
    return _file()["rule"]


def explains() -> dict[str, list[str]]:
    """The findings that follow from each finding."""
    return _file()["explains"] | {rule["key"]: rule["explains"] for rule in rules() if "explains" in rule}


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def _nothing_learned(record: RunRecord, last: str, rose: bool) -> list[Finding]:
    """The run's own warning that it learns nothing. If everything is learned already, it is a note.

    Args:
        rose: whether the reward rose.
    """
    if record.facts is None:
        return []
    problem = at_the_end(record.steps, record.facts)
    if problem is None:
        return []
    done = problem.cause == "known" or (problem.cause == "always_right" and rose)
    severity, cause = ("note", "everything is learned") if done else ("problem", "nothing is learned")
    return [Finding(problem.cause, severity, problem.numbers, cause, (), problem.advice, last)]


def _finding(rule: Mapping[str, Any], values: Mapping[str, Any]) -> Finding:
    texts = {name: _filled(rule.get(name, ""), values) for name in ("numbers", "cause", "effect")}
    known = [text for text in rule.get("change", ()) if all(p[1] in values for p in _PLACE.finditer(text))]
    change = tuple(_filled(text, values) for text in known)
    return Finding(
        key=rule["key"],
        severity=rule["severity"],
        change=change,
        steps=values["last_steps"] if rule.get("over") == "last" else f"{values['first_step']}-{values['last_step']}",
        **texts,
    )


def _filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with ``{name}``, ``{name*factor}`` and ``{name:format}`` replaced."""

    def shown(place: re.Match[str]) -> str:
        value = values.get(place[1], "?")
        if isinstance(value, list):
            return ", ".join(map(str, value))
        if place[2] and isinstance(value, int | float):
            value = round(value * float(place[2])) if isinstance(value, int) else value * float(place[2])
        if isinstance(value, float):
            return format(value, place[3] or ".3g")
        return str(value)

    return _PLACE.sub(shown, text)
