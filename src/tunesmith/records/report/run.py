"""A run's directory as plain JSON values for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError, TunesmithError, boundary
from tunesmith.records.catalogue import CATALOGUE, find
from tunesmith.records.doctor.findings import diagnose
from tunesmith.records.doctor.record import read_record
from tunesmith.records.facts import read_facts
from tunesmith.records.plain import JsonObject
from tunesmith.records.report.metrics import MetricsFile, curves, totals
from tunesmith.records.report.rollouts import RolloutIndex, sample
from tunesmith.records.report.steps import step_timelines
from tunesmith.records.report.trace import read_traces
from tunesmith.records.run_dir import PLAN_FILE, is_running
from tunesmith.records.runs import check_holds, progress_of
from tunesmith.records.standing import STATE_FILE, read_standing
from tunesmith.records.storage import read_json
from tunesmith.records.text import first_and_last
from tunesmith.records.wilson import wilson

EXAMPLES = 12
"""Number of held-out prompts shown with their first and last answers."""
FILES = ("metrics.jsonl", "resolved.json", "rollouts.jsonl", STATE_FILE)
"""A run's directory has at least one of them."""


@dataclass(slots=True)
class GrowingRun:
    """A run whose growing files are read further with each ``read_on``."""

    path: Path
    metrics: MetricsFile
    rollouts: RolloutIndex
    _judged: tuple[int, bool, list[JsonObject], str | None] | None = None
    """The number of steps at the last diagnosis, whether the run went on, and the result."""

    def read_on(self) -> bool:
        """Returns whether the metrics or the rollouts have changed."""
        size = self.rollouts.size
        self.rollouts.read_on()
        return self.metrics.read_on() | (size != self.rollouts.size)

    def findings(self) -> tuple[list[JsonObject], str | None]:
        """The doctor's findings, or why it could not judge. A run is judged again after 2% more
        steps, and when it has ended."""
        rows = self.metrics.steps.rows
        goes_on = is_running(self.path)
        before, went_on, *_ = self._judged or (-1, goes_on)
        if not before <= rows <= before * 1.02 or goes_on != went_on:
            try:
                findings = [asdict(finding) for finding in diagnose(read_record(self.path))]
                self._judged = rows, goes_on, findings, None
            except TunesmithError as error:
                self._judged = rows, goes_on, [], str(error)
        assert self._judged is not None
        return self._judged[2:]


def open_run(path: Path) -> GrowingRun:
    """The run in a directory, read as far as it is written.

    Raises:
        ConfigError: ``path`` is not a run's directory.
        StorageError: its files cannot be read.
    """
    with boundary(StorageError, f"cannot read {path}", OSError):
        check_holds(path, FILES)
    rollouts = RolloutIndex(path / "rollouts.jsonl")
    run = GrowingRun(path, MetricsFile(path / "metrics.jsonl"), rollouts)
    run.read_on()
    return run


def names(paths: Sequence[Path]) -> list[str]:
    """A name for each run: as much of the end of its path as distinguishes it."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(set(parts)):
            return ends
    return [str(path) for path in paths]


def run_json(run: GrowingRun, name: str) -> JsonObject:
    """Everything about a run except its rollouts."""
    settings, notes, problems = read_settings(run.path / "resolved.json")
    steps = run.metrics.steps
    damaged = run.metrics.damaged
    if damaged:
        numbers = ", ".join(map(str, damaged[:5]))
        problems.append(f"left out: {len(damaged)} lines of metrics.jsonl, no records: {numbers}")
    if run.rollouts.damaged:
        problems.append(f"left out: {run.rollouts.damaged} lines of rollout files, no rollouts")
    if not steps.rows:
        problems.append("no step is complete yet")
    findings, why_none = run.findings()
    step = int(steps.column("step")[-1]) if steps.rows else 0
    traces = read_traces(run.path / "trace")
    progress = progress_of(run.path, {key: entry["value"] for key, entry in settings.items()}, step)
    return {
        "name": name,
        "path": str(run.path),
        "state": progress.state,
        "steps": progress.step,
        "total_steps": progress.total,
        "unit": "step" if read_standing(run.path) is None else "prompt",
        "problems": problems,
        "notes": notes,
        "curves": curves(steps),
        "evaluations": evaluations(run),
        "examples": examples(run.rollouts),
        "seconds": totals(steps, "seconds/"),
        "settings": settings,
        "plan": read_plan(run.path),
        "findings": findings,
        "no_findings": why_none,
        "traces": [*traces, *step_timelines(steps, [trace["step"] for trace in traces])],
        "rollouts": {"groups": len(run.rollouts.groups()), "bytes": run.rollouts.size},
    }


def read_settings(path: Path) -> tuple[dict[str, JsonObject], list[str], list[str]]:
    """Settings by dotted key, each with ``value``, ``source`` and ``reason``; notes on them;
    problems of the file."""
    if not path.exists():
        return {}, [], [f"{path.name} is missing: the settings are not known"]
    try:
        saved = read_json(path)
        kept = {key: dict(entry) for key, entry in saved["settings"].items() if "value" in entry}
        return kept, [str(note) for note in saved.get("notes", ())], []
    except (StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        return {}, [], [f"{path.name} cannot be read, or is of another version: {why}"]


def read_plan(path: Path) -> JsonObject | None:
    """The plan made when the run began; None if there is no readable plan."""
    try:
        plan = read_json(path / PLAN_FILE)
        return {"memory": list(plan["memory"]), "seconds": dict(plan["seconds"])}
    except (StorageError, ValueError, KeyError, TypeError):
        return None


def evaluations(run: GrowingRun) -> JsonObject:
    """Curves of the evaluations. ``low`` and ``high`` of a share are its 95% interval for the
    number of prompts."""
    evaluated = curves(run.metrics.evaluations)
    facts = read_facts(run.path)
    size = facts.eval_size if facts else None
    for name, curve in evaluated["metrics"].items():
        metric = find(name)
        if size and "low" not in curve and metric and metric.unit == "share":
            shares = [v if v is not None and 0 <= v <= 1 else None for v in curve["mean"]]
            bounds = [(None, None) if v is None else wilson(v, size) for v in shares]
            ends = [[end and round(end, 4) for end in ends] for ends in zip(*bounds, strict=True)]
            curve["low"], curve["high"] = ends
    return {**evaluated, "prompts": size}


def examples(index: RolloutIndex) -> list[JsonObject]:
    """The first and last answers to the same held-out prompts."""
    groups = enumerate(index.groups(), index.dropped)
    steps = {place: group.step for place, group in groups if group.kind == "eval"}
    if not steps:
        return []
    ends = {min(steps.values()), max(steps.values())}
    places = [place for place, step in steps.items() if step in ends]
    pairs = first_and_last(line for place in places for line in index.lines(place))[:EXAMPLES]
    return [{"before": before, "after": after} for before, after in pairs]


def described(metrics: Sequence[str]) -> dict[str, JsonObject]:
    """Each metric's group in the catalogue, unit and meaning."""
    kinds = {metric.name: kind for kind, table in CATALOGUE.items() for metric in table}
    texts: dict[str, JsonObject] = {}
    for name in metrics:
        metric = find(name)
        about = {"unit": metric.unit, "meaning": metric.meaning} if metric else {}
        texts[name] = {"group": kinds[metric.name] if metric else "other", **about}
    return texts


def model(runs: Sequence[GrowingRun]) -> JsonObject:
    """All runs for the page, without rollouts."""
    named = zip(runs, names([run.path for run in runs]), strict=True)
    made = [run_json(run, name) for run, name in named]
    parts = [run[part]["metrics"] for run in made for part in ("curves", "evaluations")]
    metrics = dict.fromkeys(name for part in parts for name in part)
    return {"runs": made, "metrics": described(list(metrics))}


def embedded_rollouts(run: GrowingRun, most: int) -> list[JsonObject]:
    """A sample of the groups with their lines, of at most ``most`` bytes in the files."""
    index = run.rollouts
    places = sample(index, most)
    return [{**group_json(index, place), "lines": index.lines(place)} for place in places]


def group_json(index: RolloutIndex, place: int) -> Mapping[str, Any]:
    """A group as shown in the list."""
    return {"place": place, **index.groups()[place - index.dropped]._asdict()}
