"""Compares runs, read from their directories: their settings, progress and differences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tunesmith.errors import ConfigError, StorageError, TunesmithError, boundary
from tunesmith.records.metrics import is_evaluation, newest_objects, numbers
from tunesmith.records.plain import JsonObject, Row
from tunesmith.records.run_dir import LATEST, holds_run, is_running
from tunesmith.records.standing import read_standing
from tunesmith.records.storage import read_json

END_BYTES = 1 << 16
"""Bytes read from the end of the metrics to learn a run's progress."""
LEARNED = ("reward", "loss", "accuracy", "margin", "sampled_right", "accepted", "eval/accuracy")
NOT_COMPARED = ("step", "time")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run. ``last``: the newest step's line in ``metrics.jsonl``; ``settings`` by dotted key."""

    path: Path
    settings: Row
    last: Row
    progress: RunProgress

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def state(self) -> str:
        return self.progress.state


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come: steps, or prompts of batch inference and RFT.

    ``state`` is ``running``, ``done``, ``stopped`` before the last step or, if that is known,
    ``failed``.
    """

    state: str
    step: int
    total: int | None
    command: str | None = None
    """``generate`` or ``rft``; None: another."""


def progress_of(path: Path, settings: Row, step: int) -> RunProgress:
    """How far a run is, and whether it goes on.

    Args:
        step: the last one in ``metrics.jsonl``.
    """
    running = is_running(path)
    standing = read_standing(path)
    if standing:
        seen = standing.seen(running=running)
        return RunProgress(seen.state, max(step, seen.answered), seen.total, seen.command)
    steps = settings.get("train.steps")
    total = steps if isinstance(steps, int) else None
    done = total is not None and step >= total
    return RunProgress("running" if running else "done" if done else "stopped", step, total)


def find_runs(directory: Path) -> list[RunSummary]:
    """The runs in a directory, the newest first.

    Raises:
        ConfigError: there is none.
    """
    with boundary(ConfigError, f"cannot read {directory}", OSError):
        inside = list(directory.iterdir()) if directory.is_dir() else []
    paths = [path for path in inside if not path.is_symlink() and _holds_run(path)]
    if not paths:
        how = "Name a directory with: tunesmith runs list DIRECTORY"
        raise ConfigError(f"{directory} holds no runs. {how}")
    return [_listed(path) for path in sorted(paths, key=_changed, reverse=True)]


def _holds_run(path: Path) -> bool:
    with suppress(OSError):
        return holds_run(path)
    return False


def _listed(path: Path) -> RunSummary:
    """A run, without its settings and metrics if they cannot be read, so that the others are
    listed."""
    try:
        return read_run(path)
    except TunesmithError:
        return RunSummary(path, {}, {}, RunProgress("cannot be read", 0, None))


def read_run(path: Path) -> RunSummary:
    """Read a run's settings and progress; only the end of its metrics is read.

    Raises:
        ConfigError: it is not a run's directory.
    """
    if not path.is_dir() or not holds_run(path):
        raise ConfigError(f"{path} is not the directory of a run. Name one, such as runs/{LATEST}")
    lines = last_lines(path)
    settings = read_settings(path)
    if read_standing(path):
        # Each line has what was measured then: samples, a round's yield, an evaluation.
        last = {name: value for line in lines for name, value in line.items() if value is not None}
    else:
        last = next((line for line in reversed(lines) if not is_evaluation(line)), {})
    return RunSummary(path, settings, last, progress_of(path, settings, int(last.get("step", 0))))


def check_holds(path: Path, files: Sequence[str]) -> None:
    """Reject (ConfigError) a path that is not a run's directory: it has none of these files."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory. Name a run's, such as runs/{LATEST}")
    if not any((path / name).exists() for name in files):
        inside = sorted({file.parent.name for name in files for file in path.glob(f"*/{name}")})
        choice = f"; it holds the runs {', '.join(inside)}" if inside else ""
        what = f"has no {' or '.join(files)}, so it is not a run's directory"
        raise ConfigError(f"{path} {what}{choice}")


def read_settings(path: Path) -> JsonObject:
    """The settings of ``resolved.json`` by dotted key; none if it is missing or of another
    version."""
    try:
        entries = read_json(path / "resolved.json")["settings"]
        return {key: entry["value"] for key, entry in entries.items()}
    except (StorageError, KeyError, TypeError, AttributeError):
        return {}


def last_lines(path: Path, most_bytes: int | None = END_BYTES) -> list[JsonObject]:
    """The whole lines among the last ``most_bytes`` (None: all) of a run's metrics."""
    lines = newest_objects(path / "metrics.jsonl", most_bytes)
    return [line for line in lines if isinstance(line.get("step"), int)]


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Settings in which runs differ: the value of each run by key."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def late_means(path: Path) -> dict[str, float]:
    """Each metric's mean over the last fifth of the steps; for evaluations the last value."""
    lines = [numbers(line) for line in last_lines(path, None)]
    steps = [line for line in lines if not is_evaluation(line)]
    late = steps[-max(1, len(steps) // 5) :]
    columns: dict[str, list[float]] = {}
    for line in late:
        for name, value in line.items():
            columns.setdefault(name, []).append(value)
    means = {name: fmean(values) for name, values in columns.items()}
    for line in filter(is_evaluation, lines):
        means |= line
    return {name: value for name, value in means.items() if name not in NOT_COMPARED}


def _changed(path: Path) -> float:
    files = [path / "metrics.jsonl", path / "resolved.json", path]
    return next((file.stat().st_mtime for file in files if file.exists()), 0.0)
