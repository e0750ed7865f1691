"""The files of a run that the doctor reads. A run may still be active, or have ended at any
point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tunesmith.errors import ConfigError, StorageError
from tunesmith.records.metrics import is_evaluation, newest_objects, numbers
from tunesmith.records.run_dir import is_running
from tunesmith.records.runs import check_holds, read_settings
from tunesmith.records.standing import STATE_FILE, Standing, read_standing
from tunesmith.records.storage import read_json, write_json

FACTS_FILE = "facts.json"
MOST_BYTES = 32 << 20
"""Bytes read from the end of the metrics and of the rollouts: about the newest 20,000 steps."""
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that are needed to judge its metrics."""

    rollouts: bool = False
    """Whether it samples, or trains on given data."""
    rewarded: bool = True
    """Whether it learns from rewards; with a teacher it does not."""
    from_total: bool = True
    """Whether equal total rewards teach nothing; False if individual rewards or lengths also
    count."""
    compares_group: bool = True
    """Whether a rollout is compared with the others of its group."""
    full_reward: float | None = None
    """The reward of a perfect answer, if known."""
    frozen_steps: int = 0
    """Number of initial steps in which only the critic learns."""
    reach: float = 1.0
    """Learning rate times optimizer steps of the run."""
    lr: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 0
    unknown: float = 0.0
    """Share of the prompts' tokens that are unknown to the tokenizer."""
    train_size: int = 0
    """Tasks or samples."""
    eval_size: int | None = None
    repeated: float = 0.0
    """Share of duplicates in the training data."""
    seen: float = 0.0
    """Share of the held-out data that is in the training data."""
    too_long: float = 0.0
    """Share of the training data's lines that were left out because they are too long."""
    bad: float = 0.0
    """Share of its lines that were left out because they are unusable."""
    source_share: float | None = None
    """Share of the samples from the largest source, if there are several."""
    threads_per_core: float = 1.0
    """Threads of all processes that compute at once on this machine's CPU, per usable core."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``settings`` by dotted key; ``steps`` and ``evaluations`` are lines of ``metrics.jsonl``
    without nulls."""

    path: Path
    settings: Mapping[str, Any]
    steps: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    rollouts: Sequence[Mapping[str, Any]]
    """The newest rollouts that training kept."""
    facts: RunFacts | None
    running: bool
    standing: Standing | None = None
    """How far a run of batch inference or RFT has come; None for other runs."""
    rounds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    """``base``, ``round-1``, ... of RFT: ``yield`` and ``evaluation``, as far as they are known."""


def read_record(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        ConfigError: it is not a run's directory, or the run has not completed a step.
    """
    check_holds(path, ["metrics.jsonl", STATE_FILE])
    standing = read_standing(path)
    running = is_running(path)
    finite = [numbers(line) for line in newest_objects(path / "metrics.jsonl", MOST_BYTES)]
    finite = [line for line in finite if "step" in line]
    evaluations = [line for line in finite if is_evaluation(line)]
    steps = [line for line in finite if not is_evaluation(line)]
    if not steps and not standing:
        raise ConfigError(f"{path} has no completed step yet, so that there is nothing to judge")
    return RunRecord(
        path=path,
        settings=read_settings(path),
        steps=steps,
        evaluations=evaluations,
        rollouts=[
            row
            for row in newest_objects(path / "rollouts.jsonl", MOST_BYTES)
            if row.get("kind") == "train"
        ],
        facts=read_facts(path),
        running=running,
        standing=standing and standing.seen(running=running),
        rounds=_read_rounds(path),
    )


def _read_rounds(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    folders = [path / "base", *sorted(path.glob("round-*"), key=lambda p: (len(p.name), p.name))]
    for folder in folders:
        parts: dict[str, Any] = {}
        for name in ("yield", "evaluation"):
            with suppress(StorageError):
                parts[name] = read_json(folder / f"{name}.json")
        found |= {folder.name: parts} if parts else {}
    return found


def write_facts(facts: RunFacts, run_dir: Path) -> None:
    """Write the facts for ``tunesmith doctor``, which judges a run by its files."""
    write_json(run_dir / FACTS_FILE, asdict(facts))


def read_facts(run_dir: Path) -> RunFacts | None:
    """Read the facts; None if they are missing or of another version."""
    with suppress(StorageError, TypeError, ValueError):
        found = read_json(run_dir / FACTS_FILE)
        RunFacts(**found)  # refuses other keys, and the adapter other types
        return TypeAdapter(RunFacts).validate_python(found)
    return None
