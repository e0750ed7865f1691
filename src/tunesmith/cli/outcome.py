"""What a command prints when its run has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunesmith.monitor.progress import print_summary

if TYPE_CHECKING:
    from tunesmith.build.opening import RunResult


def print_outcome(outcome: RunResult) -> None:
    """Where the time went, the evaluations' first and last values, and where the model lies."""
    facts: dict[str, str] = {}
    if outcome.evaluations:
        first, last = outcome.evaluations[0], outcome.evaluations[-1]
        for name in (n for n in last if n.startswith("eval/")):
            before = f"{_number(first[name])} → " if first is not last and name in first else ""
            facts[name.replace("/", " ")] = before + _number(last[name])
    facts |= {"run": str(outcome.run_dir), "model": str(outcome.checkpoint)}
    if outcome.best:
        facts["best"] = outcome.best
    print_summary(outcome.seconds, facts)


def _number(value: float | None) -> str:
    """None stands in the metrics for what is not finite."""
    return "nan" if value is None else f"{value:.3g}"
