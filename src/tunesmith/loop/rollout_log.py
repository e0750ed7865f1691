"""``rollouts.jsonl``: whole groups of rollouts as a person reads them, one rollout to a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError, boundary, shortened
from tunesmith.monitor.metrics import JsonLines, drop_after, read_metrics
from tunesmith.monitor.text import Example, last_message, shown_path
from tunesmith.types import Record, Rollout, RolloutGroup, Task

Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]

EVALUATED = 4
"""Prompts of an evaluation that are kept, for each group that is kept of a step."""
LONGEST_COLUMN = 2000
"""Characters of a data column that are kept."""
SUMMARY = ("kind", "group", "task", "prompt", "columns", "completion", "reward", "advantage", "status", "error")
"""What sinks are shown of a line."""


class RolloutLog:
    """Two files that hold ``most`` bytes between them: when the newer one is half of it, it replaces the older.

    Args:
        path: the newer one; the older has ``-older`` after its name.
        groups: of a step; of an evaluation, ``EVALUATED`` times as many. 0 keeps failed rollouts only.
        decode: text as people read it; ``render``: with the template's special tokens.
        resume_step: lines after this step are dropped; None drops all.
    """

    def __init__(
        self, path: Path, groups: int, most: int, decode: Decode, render: Decode, resume_step: int | None = None
    ) -> None:
        self._path, self._groups, self._most, self._decode, self._render = path, groups, most, decode, render
        for file in files(path):
            drop_after(file, -1 if resume_step is None else resume_step)
        self._lines = JsonLines(path, private=True)

    def write(self, step: int, groups: Sequence[RolloutGroup], kind: str = "train") -> list[Json]:
        """Append all rollouts of the first groups, and those that failed of the others; the lines, for a look at them.

        Raises:
            StorageError: the disk is full.
        """
        kept = self._groups if kind == "train" else self._groups * EVALUATED
        lines = [
            {"step": step, "kind": kind, "group": number, **self._line(rollout, kind)}
            for number, group in enumerate(groups)
            for rollout in group.rollouts
            if number < kept or rollout.error is not None
        ]
        for line in lines:
            self._lines.write(line)
        if self._path.stat().st_size > self._most / 2:
            self._rotate()
        return lines

    def close(self) -> None:
        self._lines.close()

    def _rotate(self) -> None:
        self._lines.close()
        with boundary(StorageError, f"cannot replace {self._path}", OSError):
            self._path.replace(files(self._path)[0])
        self._lines = JsonLines(self._path, private=True)

    def _line(self, rollout: Rollout, kind: str) -> Json:
        task = rollout.task
        rendered = self._render(task.prompt_ids)
        parts = [
            {"record": number, **part}
            for number, record in enumerate(rollout.records)
            for part in self._parts(record, kind == "train" and rollout.advantage is not None)
        ]
        return {
            "task": _place(task),
            "prompt": task.prompt,
            **({"rendered": rendered} if rendered != task.prompt else {}),
            "columns": {name: _short(value) for name, value in task.columns.items()},
            "completion": self._decode(rollout.completion_ids),
            **({"messages": rollout.messages} if rollout.messages else {}),
            **({"parts": parts} if len(parts) > 1 else {}),
            "reward": rollout.reward,
            "rewards": rollout.rewards,
            "advantage": rollout.advantage,
            "status": rollout.status.value,
            "error": rollout.error,
            "tokens": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
            "versions": _versions(rollout),
            **({"metrics": rollout.metrics} if rollout.metrics else {}),
            **({"notes": rollout.notes} if rollout.notes else {}),
        }

    def _parts(self, record: Record, learned: bool) -> Iterator[Json]:
        """Who wrote what after the prompt. What a fork's record repeats of an earlier one is not the policy's there."""
        at = record.turns[0].start if record.turns else len(record.token_ids)
        paid = {turn.stop: turn.reward for turn in record.turns if turn.reward}
        for ours, run in groupby(record.sampled[at:]):
            stop = at + len(list(run))
            part: Json = {"by": "policy" if ours else "environment", "text": self._render(record.token_ids[at:stop])}
            part |= {"tokens": stop - at, "trained": ours and learned}
            yield part | ({"reward": paid[stop]} if stop in paid else {})
            at = stop


def files(path: Path) -> tuple[Path, Path]:
    """The older and the newer file of a log."""
    return path.with_name(f"{path.stem}-older{path.suffix}"), path


def read_rollouts(path: Path) -> list[Json]:
    """All lines that are kept, oldest first."""
    return [line for file in files(path) for line in read_metrics(file)]


def summary(line: Mapping[str, Any]) -> Json:
    """What is shown of a line where there is little room."""
    return {name: line[name] for name in SUMMARY if line.get(name) not in (None, {})}


def contrast(lines: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The best and the worst rollout of the first group that has both; None where all rewards of each are equal."""
    for _, group in groupby(lines, key=lambda line: line["group"]):
        scored = sorted((line for line in group if line["reward"] is not None), key=lambda line: line["reward"])
        if scored and scored[-1]["reward"] > scored[0]["reward"]:
            return scored[-1], scored[0]
    return None


def examples(lines: Sequence[Mapping[str, Any]], count: int) -> list[Example]:
    """The first prompts of the evaluations, answered in the first one and in the last."""
    by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "eval":
            by_step.setdefault(line["step"], {})[line["task"]] = line
    if len(by_step) < 2:
        return []
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    both = [(first[task], last[task]) for task in first if task in last][:count]
    return [
        Example(last_message(a["prompt"]), (a["completion"], a["reward"]), (b["completion"], b["reward"]))
        for a, b in both
    ]


def _place(task: Task) -> str:
    """File and line of a task; the file from here, where it lies below."""
    file, mark, line = task.id.rpartition(":")
    return f"{shown_path(file)}:{line}" if mark and file.startswith("/") else task.id


def _short(value: Any) -> Any:
    return shortened(value, LONGEST_COLUMN) if isinstance(value, str) else value


def _versions(rollout: Rollout) -> list[int]:
    """The oldest and the newest version of the policy that wrote in it."""
    found = [v for r in rollout.records for v, ours in zip(r.versions, r.sampled, strict=True) if ours]
    return [min(found), max(found)] if found else []
