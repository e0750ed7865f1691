"""The tables of docs/coming-from.md, made from the data of ``tunesmith.guide.names.foreign``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from foreign_names import counts, frameworks, listed, versions
from tunesmith.guide.names.foreign import FRAMEWORKS, foreign_values, meanings
from tunesmith.guide.names.unknown import rule_of

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows."""


def coverage() -> Rows:
    """How many settings of each framework are answered, by its own argument lists."""
    rows: list[tuple[str, ...]] = []
    for framework in frameworks():
        keys, reasons, unanswered = counts(framework)
        share = f"{(keys + reasons) / len(listed(framework)):.1%}"
        name = FRAMEWORKS.get(framework, "five tuning guides")
        numbers = map(str, (len(listed(framework)), keys, reasons, len(unanswered)))
        rows.append((name, versions(framework), *numbers, share))
    return ("", "read from", "settings", "a key", "a reason", "not answered", "answered"), rows


def names(framework: str) -> Rows:
    """Settings that are keys here, in the order of the data."""
    rows = [
        (_code(meaning.names[framework]), _code(meaning.keys), rule_of(meaning).replace("|", "\\|"))
        for meaning in meanings()
        if framework in meaning.names and meaning.keys
    ]
    return (FRAMEWORKS[framework], "here", "value"), rows


def absent(framework: str) -> Rows:
    rows = [
        (_code(meaning.names[framework]), meaning.why.replace("|", "\\|"))
        for meaning in meanings()
        if framework in meaning.names and meaning.why
    ]
    return (FRAMEWORKS[framework], "why"), rows


def values() -> Rows:
    rows = [
        (f"`{key}`", f"`{ours}`", _code(theirs.split()))
        for key, spelled in foreign_values().items()
        for ours, theirs in spelled.items()
    ]
    return ("setting", "here", "elsewhere"), rows


def _code(words: Sequence[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


FOREIGN: Mapping[str, Callable[[], Rows]] = {
    "coverage": coverage,
    "values": values,
    **{f"names_{f.partition('-')[0]}": partial(names, f) for f in FRAMEWORKS},
    **{f"absent_{f.partition('-')[0]}": partial(absent, f) for f in FRAMEWORKS},
}
