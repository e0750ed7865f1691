"""What a run prints at its end: where the time went, and what to look at."""

from __future__ import annotations

from collections.abc import Mapping

from tunesmith.monitor.progress import duration, share

_WIDTH = 24


def time_table(totals: Mapping[str, float]) -> list[str]:
    """Lines ``phase  seconds  share  bar``, the longest phase first, and the sum.

    Args:
        totals: seconds by phase, as ``Clock.totals`` gives them.
    """
    whole = sum(totals.values())
    rows = [(n, s) for n, s in sorted(totals.items(), key=lambda row: -row[1]) if s >= 0.0005 * whole and s > 0]
    width = max((len(name) for name, _ in rows), default=0)
    lines: list[str] = []
    for name, seconds in rows:
        part = seconds / whole
        bar = "█" * round(_WIDTH * part)
        lines.append(f"{name:{width}}  {duration(seconds):>7}  {share(part):>5}  {bar}".rstrip())
    return [*lines, f"{'total':{width}}  {duration(whole):>7}"]


def print_summary(totals: Mapping[str, float], facts: Mapping[str, str]) -> None:
    """Where the time went, then one line per fact (``reward``: ``0.12 → 0.87``, ``checkpoint``: its path)."""
    print("\nWhere the time went")
    for line in time_table(totals):
        print(f"  {line}")
    width = max((len(name) for name in facts), default=0)
    if facts:
        print()
    for name, text in facts.items():
        print(f"{name:{width}}  {text}")
