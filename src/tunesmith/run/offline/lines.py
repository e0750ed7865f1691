"""JSON Lines files of ``tunesmith generate`` and ``tunesmith rft``: one line per task, in the order
of the data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, cast

from tunesmith.config.continuing import without_folders
from tunesmith.config.reading.files import same_path
from tunesmith.config.verdicts import CONTENTS as VERDICTS
from tunesmith.errors import ConfigError, DataError, StorageError, boundary
from tunesmith.records.metrics import JsonLines, is_whole, keep_lines
from tunesmith.records.redact import redact_values
from tunesmith.records.storage import read_json, replacing, write_json
from tunesmith.types import Rollout, RolloutGroup, Status, Task

Json = dict[str, Any]
FLAT = ("completion", "finish_reason", "tokens", "reward", "rewards", "metrics", "status", "error")
CONTENTS = "contents (digests)"
"""Of models and code, in what ``claim`` compares."""
LOGPROBS = ("token_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Turns a group into a line: the columns of its task, and its completions as a list under
    ``completions``."""

    decode: Callable[[Sequence[int]], str]
    flat: bool
    """Whether there is one completion per prompt, with its fields in the line itself."""
    scored: bool
    logprobs: bool = False
    overwritten: tuple[str, ...] = ()
    """Further columns that a file selected from these lines overwrites or drops
    (``selection.OVERWRITTEN``)."""

    def line(self, group: RolloutGroup) -> Json:
        records = [self.record(rollout) for rollout in group.rollouts]
        completions = records[0] if self.flat else {"completions": records}
        return {"prompt": group.task.prompt, **group.task.columns, **completions}

    def record(self, rollout: Rollout) -> Json:
        """``{"completion", "finish_reason", "tokens"}``, with the reward, and with the error of a
        failed rollout."""
        record: Json = {
            "completion": self.decode(rollout.answer_ids),
            "finish_reason": rollout.finish_reason,
            "tokens": rollout.num_sampled,
        }
        if self.logprobs:
            tokens = rollout.records[-1]
            record["token_ids"] = list(compress(tokens.token_ids, tokens.sampled))
            record["logprobs"] = list(compress(tokens.logprobs, tokens.sampled))
        if self.scored or rollout.status is not Status.OK:
            record |= scores_of(rollout)
        return record

    def check_columns(self, tasks: Sequence[Task]) -> None:
        """Reject data whose columns the output would overwrite.

        Raises:
            DataError: names the column.
        """
        own = (*FLAT, *(LOGPROBS if self.logprobs else ())) if self.flat else ("completions",)
        for task in tasks:
            clash = [name for name in (*own, *self.overwritten) if name in task.columns]
            if clash:
                raise DataError(
                    f"task {task.id}: the data has a column '{clash[0]}', which the output would "
                    "write over; rename it"
                )


def scores_of(rollout: Rollout) -> Json:
    """The total reward, each function's reward, the numbers they logged, and the error if there is
    one."""
    scores: Json = {"reward": rollout.reward, "rewards": rollout.rewards}
    if rollout.metrics:
        scores["metrics"] = rollout.metrics
    if rollout.status is not Status.OK:
        scores |= {"status": rollout.status.value, "error": rollout.error}
    return scores


def records_of(line: Mapping[str, object]) -> list[Json]:
    """The completions of a line: the list ``completions``, or the one in the line itself."""
    return cast("list[Json]", line["completions"]) if "completions" in line else [dict(line)]


def repair(path: Path) -> int:
    """Cut off an incomplete last line, which a killed process leaves. Returns the number of whole
    lines.

    Raises:
        DataError: whole lines follow a damaged one, which a kill cannot cause; nothing is cut.
    """
    if path.exists():
        with boundary(StorageError, f"cannot read {path}", OSError), path.open("rb") as file:
            whole = [is_whole(line, _is_object) for line in file]
        if whole != sorted(whole, reverse=True):
            raise DataError(
                f"{path}, line {whole.index(False) + 1}: not a JSON object, and whole lines come "
                "after it. Correct or remove that line; those after it would be lost"
            )
    return keep_lines(path, _is_object)


def _is_object(line: object) -> bool:
    return isinstance(line, dict)


def read_lines(path: Path) -> Iterator[Json]:
    """The lines of a file, one at a time."""
    unreadable = boundary(StorageError, f"cannot read {path}", OSError)
    with unreadable, path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def unfinished_file(path: Path) -> Path:
    """The file next to an output with what cannot be written to it yet; see ``Unfinished``."""
    return path.with_name(f".{path.stem}.unfinished.jsonl")


def count_answered(path: Path) -> int:
    """Number of finished lines, with those that are not written to the output yet."""
    count = 0
    for file, mark in ((path, b""), (unfinished_file(path), b', "line": ')):
        if file.exists():
            with boundary(StorageError, f"cannot read {path}", OSError), file.open("rb") as lines:
                count += sum(line.endswith(b"\n") and mark in line for line in lines)
    return count


def write_whole(path: Path, lines: Iterator[Json]) -> int:
    """Write a file atomically: whole or not at all. Returns its number of lines."""
    count = 0
    with boundary(StorageError, f"cannot write {path}", OSError), replacing(path) as unfinished:
        out = JsonLines(unfinished, private=True)
        for count, line in enumerate(lines, 1):  # noqa: B007
            out.write(line)
        out.close()
    return count


def claim(path: Path, identity: Mapping[str, object], run_dir: Path) -> None:
    """Record the origin of an output file's lines in a file next to it, or compare with an existing
    record. ``run_dir`` may have been moved, with a model in it; if both have ``CONTENTS``, and the
    same, so may the files that the settings name.

    Raises:
        ConfigError: the file was begun with another origin, or with other weights in its files.
    """
    note = path.with_name(f".{path.stem}.source.json")
    if not path.exists():
        # The user has deleted the output to begin again.
        unfinished_file(path).unlink(missing_ok=True)
    plain = json.loads(json.dumps(redact_values(identity)))
    home = f"{os.path.realpath(run_dir)}/"

    def kept(value: object) -> Any:
        value = same_path(value)
        return value.removeprefix(home) if isinstance(value, str) else value

    current: Json = {key: kept(value) for key, value in plain.items()}
    if path.exists() and note.exists():
        before = read_json(note)
        keys = [key for key in {**before, **current} if key != CONTENTS]
        is_moved = CONTENTS in before and before[CONTENTS] == current.get(CONTENTS)

        def differs(key: str) -> bool:
            then = kept(before.get(key))
            now = current.get(key)
            return then != now and not (is_moved and without_folders(then) == without_folders(now))

        changed = list(filter(differs, keys))
        if changed:
            raise ConfigError(
                f"{path} was begun with {changed[0]} = {before.get(changed[0])!r}, and it is now "
                f"{current.get(changed[0])!r}: its lines would not belong together. Set another "
                f"run_dir, or delete {path}"
            )
        now: dict[str, str] = current.get(CONTENTS, {})
        for name, digest in before.get(CONTENTS, {}).items():
            verdict = VERDICTS[name]
            if verdict.refused and now.get(name, digest) != digest:
                changed_text = verdict.text.format(name=current[verdict.key])
                raise ConfigError(
                    f"since {path} was begun, {changed_text}: its lines would not belong together. "
                    f"Set another run_dir, or delete {path}",
                    keys=(verdict.key,),
                )
    write_json(note, current)
