"""The output of a command when its run has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.doors import Door
from tunesmith.records.progress import duration, each_once, print_summary, share
from tunesmith.records.text import shown_path

if TYPE_CHECKING:
    from tunesmith.records.text import EvalExample
    from tunesmith.run.assembly.session import RunResult


FINDINGS = Door[Callable[[Path], list[str]]](
    "findings", "tunesmith.records.doctor.findings:serious_findings"
)


def print_outcome(outcome: RunResult) -> None:
    """Print the time by phase, the evaluations' first and last values, and the model's path."""
    print_examples(outcome.examples)
    facts: dict[str, str] = {}
    if outcome.evaluations:
        first = outcome.evaluations[0]
        last = outcome.evaluations[-1]
        for name in (n for n in last if n.startswith("eval/")):
            before = f"{_number(first[name])} → " if first is not last and name in first else ""
            if name != "eval/failed" or first.get(name) or last[name]:
                facts[name.removeprefix("eval/")] = before + _number(last[name])
    facts = {f"eval {names}": value for names, value in each_once(facts).items()}
    facts |= {"run": shown_path(outcome.run_dir), "model": shown_path(outcome.checkpoint)}
    if outcome.best:
        facts["best"] = outcome.best
    if outcome.warning:
        facts["warning"] = outcome.warning
    found = _findings(outcome.run_dir)
    if found:
        facts["doctor"] = f"{', '.join(found)}: tunesmith doctor {shown_path(outcome.run_dir)}"
    print_summary(outcome.seconds, facts)


def _findings(run_dir: Path) -> list[str]:
    """The doctor's findings, without notes."""
    with suppress(Exception):  # a successful run must not fail here
        return [key for find in FINDINGS.rooms for key in find(run_dir)]
    return []


def print_usage(usage: Mapping[str, float], earlier: float, facts: Mapping[str, str]) -> None:
    """Print the time of all calls of a run by phase, its peak memory, and ``facts``.

    Args:
        usage: as counted by ``offline.usage.Usage``.
        earlier: seconds of calls before this one.
    """
    from tunesmith.config.values import format_size
    from tunesmith.run.offline.usage import seconds_of

    rows = {"earlier calls": duration(earlier)} if earlier else {}
    for name, metric in (
        ("memory", "memory/host_peak"),
        ("GPU memory", "memory/device_peak"),
        ("KV memory", "kv_peak"),
    ):
        if metric in usage:
            rows[name] = f"{format_size(usage[metric])} at most"
    if "kv_used" in usage and "KV memory" in rows:  # if all was there, the engine held nothing
        rows["KV memory"] += f", {share(usage['kv_used'])} of system.kv_memory"
    print_summary(seconds_of(usage), rows | dict(facts))


def print_examples(examples: Sequence[EvalExample]) -> None:
    """Print the model's answers before and after training."""
    if examples:
        print("\nHeld-out prompts, answered before training and after it")
    for example in examples:
        print("\n".join(example.lines()))


def _number(value: float | None) -> str:
    """A metric as text; None stands for a value that is not finite."""
    return "nan" if value is None else f"{value:.3g}"
