"""The files of a run that the doctor reads. A run may still be active, or have ended at any point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.monitor.learning import RunFacts, read_facts
from tunesmith.monitor.metrics import is_evaluation, newest_objects, numbers
from tunesmith.monitor.run_dir import is_running
from tunesmith.monitor.runs import check_holds, read_settings

MOST_BYTES = 32 << 20
"""Bytes read from the end of the metrics and of the rollouts: about the newest 20,000 steps."""
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``settings`` by dotted key; ``steps`` and ``evaluations`` are lines of ``metrics.jsonl`` without nulls."""

    path: Path
    settings: Mapping[str, Any]
    steps: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    rollouts: Sequence[Mapping[str, Any]]
    """The newest rollouts that training kept."""
    facts: RunFacts | None
    running: bool


def read_record(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        ConfigError: it is not a run's directory, or the run has not completed a step.
    """
    check_holds(path, ["metrics.jsonl"])
    finite = [numbers(line) for line in newest_objects(path / "metrics.jsonl", MOST_BYTES)]
    finite = [line for line in finite if "step" in line]
    evaluations = [line for line in finite if is_evaluation(line)]
    steps = [line for line in finite if not is_evaluation(line)]
    if not steps:
        raise ConfigError(f"{path} has no completed step yet, so that there is nothing to judge")
    return RunRecord(
        path=path,
        settings=read_settings(path),
        steps=steps,
        evaluations=evaluations,
        rollouts=[row for row in newest_objects(path / "rollouts.jsonl", MOST_BYTES) if row.get("kind") == "train"],
        facts=read_facts(path),
        running=is_running(path),
    )
