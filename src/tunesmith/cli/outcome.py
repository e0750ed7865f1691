"""What a command prints when its run has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunesmith.monitor.progress import print_summary

if TYPE_CHECKING:
    from tunesmith.loop.opening import Outcome


def print_outcome(outcome: Outcome) -> None:
    """Where the time went, the evaluations' first and last values, and where the model lies."""
    facts: dict[str, str] = {}
    if outcome.evaluations:
        first, last = outcome.evaluations[0], outcome.evaluations[-1]
        for name in (n for n in last if n.startswith("eval/")):
            before = f"{first[name]:.3g} → " if first is not last and name in first else ""
            facts[name.replace("/", " ")] = f"{before}{last[name]:.3g}"
    facts |= {"run": str(outcome.run_dir), "model": str(outcome.checkpoint)}
    print_summary(outcome.seconds, facts)
