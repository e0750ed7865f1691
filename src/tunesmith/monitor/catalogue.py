"""Every metric there is, read from ``catalogue.toml``: unit, form, meaning, and other tools' names for it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """``<word>`` in ``name`` stands for any word; an alias may use the same one."""

    name: str
    form: Literal["mean", "sum", "max", "min", "std", "last", "rate"]
    """How the value of a step is formed; ``last`` is the state at its end."""
    meaning: str
    unit: str = ""
    aliases: tuple[str, ...] = ()


def _read() -> dict[str, tuple[Metric, ...]]:
    text = files("tunesmith.monitor").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return {
        kind: tuple(_metric(name, entry) for name, entry in table.items())
        for kind, table in tomllib.loads(text).items()
    }


def _metric(name: str, entry: dict[str, Any]) -> Metric:
    return Metric(name, entry["form"], entry["meaning"], entry.get("unit", ""), tuple(entry.get("aliases", ())))


CATALOGUE: Mapping[str, tuple[Metric, ...]] = _read()
"""By kind; a kind is a table in the documents."""


def find(name: str) -> Metric | None:
    """The metric of a name, as it stands in a run's ``metrics.jsonl``."""
    return next((metric for metric in _exact_first() if re.fullmatch(_pattern(metric.name), name)), None)


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and each again under other tools' names for it. A metric's own name has precedence."""
    return {alias: value for name, value in metrics.items() for alias in aliases(name)} | dict(metrics)


@cache
def aliases(name: str) -> tuple[str, ...]:
    """Other tools' names for one metric: ``reward/std`` is ``reward_std`` elsewhere."""
    if (metric := find(name)) is None:
        return ()
    match = re.fullmatch(_pattern(metric.name), name)
    words = match.groupdict() if match else {}
    return tuple(re.sub(r"<(\w+)>", lambda place: words[place[1]], alias) for alias in metric.aliases)


@cache
def _exact_first() -> tuple[Metric, ...]:
    """Entries without ``<word>`` come first, so that ``rollouts/failed`` is not taken for a status."""
    every = [metric for kind in CATALOGUE.values() for metric in kind]
    return tuple(sorted(every, key=lambda metric: metric.name.count("<")))


@cache
def _pattern(name: str) -> str:
    """``reward/<name>/std`` as an expression. A word may hold any character: users name their reward functions."""
    return re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.sub(r"[.@+*?()\[\]]", r"\\\g<0>", name))
