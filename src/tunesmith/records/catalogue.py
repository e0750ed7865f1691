"""All metrics, read from ``catalogue.toml``: unit, form, meaning, and other tools' names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tunesmith.records.toml import table_beside


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. ``<word>`` in ``name`` is a placeholder for any word, which an alias may repeat."""

    name: str
    form: Literal["mean", "sum", "max", "min", "std", "last", "rate"]
    """How a step's value is aggregated; ``last`` is the state at its end."""
    meaning: str
    unit: str = ""
    aliases: Sequence[str] = ()

    def match(self, name: str) -> re.Match[str] | None:
        """Match a metric name and its placeholders, which may hold any character because users name
        their functions."""
        return re.fullmatch(re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(self.name)), name)


CATALOGUE: Mapping[str, Sequence[Metric]] = {
    kind: [Metric(name, **entry) for name, entry in table.items()]
    for kind, table in table_beside(__file__, "catalogue.toml").items()
}
"""Metrics by kind; each kind is a table in the documentation."""
_EVERY = [metric for kind in CATALOGUE.values() for metric in kind]
_EXACT_FIRST = sorted(_EVERY, key=lambda metric: metric.name.count("<"))
"""``rollouts/failed`` comes before ``rollouts/<status>``."""


def find(name: str) -> Metric | None:
    """The metric with a name, as in a run's ``metrics.jsonl``."""
    return next((metric for metric in _EXACT_FIRST if metric.match(name)), None)


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, repeated under other tools' names. A metric's own name has precedence."""
    also = {alias: value for name, value in metrics.items() for alias in aliases(name)}
    return {**also, **metrics}


@cache
def aliases(name: str) -> tuple[str, ...]:
    """Other tools' names for one metric: ``reward/std`` is ``reward_std`` elsewhere."""
    metric = find(name)
    if metric is None:
        return ()
    words = metric.match(name)
    assert words is not None, "it was found by its name"
    return tuple(words.expand(alias.replace("<", r"\g<")) for alias in metric.aliases)
