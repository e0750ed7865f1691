"""The files of a run that the doctor reads. A run may still be active, or have ended at any
point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.errors import ConfigError, StorageError
from tunesmith.records.facts import Metrics, RunFacts, read_facts
from tunesmith.records.metrics import is_evaluation, newest_objects, numbers
from tunesmith.records.plain import JsonObject, Row
from tunesmith.records.run_dir import is_running
from tunesmith.records.runs import check_holds, read_settings
from tunesmith.records.standing import STATE_FILE, Standing, read_standing
from tunesmith.records.storage import read_json

MOST_BYTES = 32 << 20
"""Bytes read from the end of the metrics and of the rollouts: about the newest 20,000 steps."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``settings`` by dotted key; ``steps`` and ``evaluations`` are lines of ``metrics.jsonl``
    without nulls."""

    path: Path
    settings: Row
    steps: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    rollouts: Sequence[Row]
    """The newest rollouts that training kept."""
    facts: RunFacts | None
    running: bool
    standing: Standing | None = None
    """How far a run of batch inference or RFT has come; None for other runs."""
    rounds: Mapping[str, Row] = field(default_factory=dict[str, "Row"])
    """``base``, ``round-1``, ... of RFT: ``yield`` and ``evaluation``, as far as they are known."""


def read_record(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        ConfigError: it is not a run's directory, or the run has not completed a step.
    """
    check_holds(path, ["metrics.jsonl", STATE_FILE])
    standing = read_standing(path)
    running = is_running(path)
    lines = map(numbers, newest_objects(path / "metrics.jsonl", MOST_BYTES))
    finite = [line for line in lines if "step" in line]
    steps = [line for line in finite if not is_evaluation(line)]
    rollouts = newest_objects(path / "rollouts.jsonl", MOST_BYTES)
    if not steps and not standing:
        raise ConfigError(f"{path} has no completed step yet, so that there is nothing to judge")
    return RunRecord(
        path=path,
        settings=read_settings(path),
        steps=steps,
        evaluations=[line for line in finite if is_evaluation(line)],
        rollouts=[row for row in rollouts if row.get("kind") == "train"],
        facts=read_facts(path),
        running=running,
        standing=standing and standing.seen(running=running),
        rounds=_read_rounds(path),
    )


def _read_rounds(path: Path) -> dict[str, JsonObject]:
    rounds: dict[str, JsonObject] = {}
    folders = [path / "base", *sorted(path.glob("round-*"), key=lambda p: (len(p.name), p.name))]
    for folder in folders:
        parts: JsonObject = {}
        for name in ("yield", "evaluation"):
            with suppress(StorageError):
                parts[name] = read_json(folder / f"{name}.json")
        if parts:
            rounds[folder.name] = parts
    return rounds
