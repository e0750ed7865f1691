"""The rules in ``rules.toml``, and the findings that they make."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from tunesmith.plan.rules.rules import applies

Severity = Literal["problem", "warning", "note"]
SEVERITIES: Sequence[Severity] = ("problem", "warning", "note")
_PLACE = re.compile(r"\{([^{}*:]+)(?:\*([\d.]+))?(?::([^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class Finding:
    """``change`` holds settings to write, ``key = value``; ``effect`` describes their effect, or what to do."""

    key: str
    severity: Severity
    numbers: str
    cause: str
    change: tuple[str, ...]
    effect: str
    steps: str
    """The steps that the numbers cover."""


@cache
def rules() -> dict[str, list[dict[str, Any]]]:
    """The tables of the file: ``rule``, ``answers``, ``harmful``, ``nothing_learned`` and ``at_the_end``."""
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def applied(table: str, values: Mapping[str, Any], first: Finding | None = None) -> list[Finding]:
    """The findings of a table, the worst first, without those that another one explains.

    Args:
        first: a finding in addition; it replaces one with the same key.
    """
    found = {first.key: first} if first else dict[str, Finding]()
    for rule in rules()[table]:
        if applies(rule, values):
            found.setdefault(rule["key"], described(rule, values))
    explained = {key for rule in chain(*rules().values()) if rule["key"] in found for key in rule.get("explains", ())}
    kept = [finding for key, finding in found.items() if key not in explained]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))


def described(rule: Mapping[str, Any], values: Mapping[str, Any]) -> Finding:
    """The finding of a rule that applies to these values."""
    texts = {name: _filled(rule.get(name, ""), values) for name in ("numbers", "cause", "effect")}
    known = [text for text in rule.get("change", ()) if all(_can_fill(p, values) for p in _PLACE.finditer(text))]
    change = tuple(_filled(text, values) for text in known)
    steps = values["last_steps"] if rule.get("over") == "last" else f"{values['first_step']}-{values['last_step']}"
    return Finding(key=rule["key"], severity=rule["severity"], change=change, steps=steps, **texts)


def _can_fill(place: re.Match[str], values: Mapping[str, Any]) -> bool:
    """Whether a place's value is known and, if it is multiplied, a number."""
    value = values.get(place[1])
    return value is not None and not (place[2] and isinstance(value, str))


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
