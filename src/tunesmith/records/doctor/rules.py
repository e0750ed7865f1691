"""Findings, and the rules that make them: each is a typed function that yields the evidence for one
finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, Generic, Literal, TypeVar

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
Evidence = Iterator[str]
Read = TypeVar("Read")
"""What the rules of a file read."""
ReadBy = TypeVar("ReadBy", contravariant=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """``change`` holds settings to write, ``key = value``; ``effect`` describes their effect, or
    what to do."""

    key: str
    severity: Severity
    numbers: str
    cause: str
    change: tuple[str, ...]
    effect: str
    steps: str
    """The steps that the numbers cover."""


@dataclass(frozen=True)
class Change(Generic[ReadBy]):
    """A setting to change. ``value`` returns what to write, or None if that is not known."""

    key: str
    value: Callable[[ReadBy], str | None]


def put(setting: str) -> Change[object]:
    """A change to a fixed value, written ``key = value``."""
    key, _, value = setting.partition(" = ")
    return Change(key, lambda _: value)


@dataclass(frozen=True)
class Rule(Generic[ReadBy]):
    """``evidence`` yields the finding's numbers if it applies; its name is the key."""

    key: str
    severity: Severity
    cause: str
    effect: str
    change: tuple[Change[ReadBy], ...]
    explains: tuple[str, ...]
    """Findings that follow from this one, and are left out beside it."""
    over_last: bool
    """Whether the numbers are means over the last steps instead of all."""
    evidence: Callable[[ReadBy], Evidence]


_explained: dict[Callable[..., Evidence], tuple[str, ...]] = {}


def explains(keys: str) -> Callable[[Callable[[Read], Evidence]], Callable[[Read], Evidence]]:
    """The keys, separated by spaces, of findings that follow from the decorated one."""

    def noted(evidence: Callable[[Read], Evidence]) -> Callable[[Read], Evidence]:
        _explained[evidence] = tuple(keys.split())
        return evidence

    return noted


class Rules(list[Rule[Read]]):
    """The rules of a file, in their order."""

    def add(
        self, severity: Severity, *change: Change[Read] | str, over_last: bool = False
    ) -> Callable[[Callable[[Read], Evidence]], Callable[[Read], Evidence]]:
        """Add the decorated function. Its docstring says the cause and, in a second paragraph, the
        effect.

        Args:
            change: a text ``key = value`` is a fixed value.
        """

        def added(evidence: Callable[[Read], Evidence]) -> Callable[[Read], Evidence]:
            cause, _, effect = (getdoc(evidence) or "").partition("\n\n")
            cause, effect = (" ".join(text.split()).removesuffix(".") for text in (cause, effect))
            changes = tuple(put(each) if isinstance(each, str) else each for each in change)
            keys = _explained.get(evidence, ())
            name = evidence.__name__
            self.append(Rule(name, severity, cause, effect, changes, keys, over_last, evidence))
            return evidence

        return added


def applied(
    rules: Iterable[Rule[Read]], run: Read, steps: str, last_steps: str = ""
) -> Iterator[Finding]:
    """The findings of the rules that apply, in their order."""
    for rule in rules:
        for numbers in rule.evidence(run):
            values = ((change.key, change.value(run)) for change in rule.change)
            change = tuple(f"{key} = {value}" for key, value in values if value is not None)
            covered = last_steps if rule.over_last else steps
            yield Finding(
                rule.key, rule.severity, numbers, rule.cause, change, rule.effect, covered
            )


def worst_first(findings: Iterable[Finding], rules: Iterable[Rule[Any]]) -> list[Finding]:
    """The first finding of each key, the worst first, without those that another one explains."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.key, finding)
    explained = {key for rule in rules if rule.key in first for key in rule.explains}
    kept = [finding for key, finding in first.items() if key not in explained]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))
