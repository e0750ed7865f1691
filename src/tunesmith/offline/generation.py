"""Answering many prompts: lines out in the order of the lines in, and a file that can be continued anywhere.

What a prompt's completions draw depends on nothing but the seed and the prompt's place in the data, so a run
that was killed and continued writes the lines that an uninterrupted one would have written.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, cast

from tunesmith.config.files import same_path
from tunesmith.engines.stats import EngineStats
from tunesmith.errors import ConfigError, DataError, StorageError, boundary
from tunesmith.loop.collect import Scorer
from tunesmith.monitor.metrics import JsonLines, is_whole, keep_lines
from tunesmith.monitor.progress import open_progress
from tunesmith.redact import redact_values
from tunesmith.rewards.metrics import check_failed, reward_metrics
from tunesmith.storage import read_json, replacing, write_json
from tunesmith.types import Completion, Rollout, RolloutGroup, Status, Task

BLOCK = 64
"""Rollouts that are judged and written together."""
EVERY = 2.0
"""Seconds between reports of the progress."""

Json = dict[str, Any]
Produce = Callable[[int, Task], Awaitable[RolloutGroup]]
"""The rollouts of the task at a place of the data."""
FLAT = ("completion", "finish_reason", "tokens", "reward", "rewards", "metrics", "status", "error")
LOGPROBS = ("token_ids", "logprobs")


class Unscored:
    """A scorer for where there is no reward."""

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        del rollouts, texts


@dataclass(frozen=True, slots=True)
class LineWriter:
    """How a group becomes a line: all columns of the data, and what was written.

    The completions are a list under ``completions``.
    """

    decode: Callable[[Sequence[int]], str]
    flat: bool
    """Of one completion per prompt, whose fields stand in the line itself."""
    scored: bool
    logprobs: bool = False
    made: tuple[str, ...] = ()
    """Columns that a file made of the lines writes or leaves out (``selection.MADE``)."""

    def line(self, group: RolloutGroup) -> Json:
        records = [self.record(rollout) for rollout in group.rollouts]
        written = records[0] if self.flat else {"completions": records}
        return {"prompt": group.task.prompt, **group.task.columns, **written}

    def record(self, rollout: Rollout) -> Json:
        """``{"completion", "finish_reason", "tokens"}``, with its reward, and its error if it failed."""
        found: Json = {
            "completion": self.decode(rollout.answer_ids),
            "finish_reason": rollout.finish_reason,
            "tokens": rollout.num_sampled,
        }
        if self.logprobs:
            record, wrote = rollout.records[-1], rollout.records[-1].sampled
            found["token_ids"] = [t for t, mine in zip(record.token_ids, wrote, strict=True) if mine]
            found["logprobs"] = [p for p, mine in zip(record.logprobs, wrote, strict=True) if mine]
        return found | (scores_of(rollout) if self.scored or rollout.status is not Status.OK else {})

    def check_columns(self, tasks: Sequence[Task]) -> None:
        """Refuse data whose columns the output would write over.

        Raises:
            DataError: naming the column.
        """
        own = (*FLAT, *(LOGPROBS if self.logprobs else ())) if self.flat else ("completions",)
        for task in tasks:
            if taken := [name for name in (*own, *self.made) if name in task.columns]:
                raise DataError(
                    f"task {task.id}: the data has a column '{taken[0]}', which the output would write over; rename it"
                )


def scores_of(rollout: Rollout) -> Json:
    """Reward, each function's own, what they logged, and what went wrong."""
    found: Json = {"reward": rollout.reward, "rewards": rollout.rewards}
    if rollout.metrics:
        found["metrics"] = rollout.metrics
    if rollout.status is not Status.OK:
        found |= {"status": rollout.status.value, "error": rollout.error}
    return found


def records_of(line: Mapping[str, Any]) -> list[Json]:
    """The completions of a line, whichever way they stand in it."""
    return cast("list[Json]", line["completions"]) if "completions" in line else [dict(line)]


def repair(path: Path) -> int:
    """Cut off what a kill left behind of a line; the number of whole lines.

    Raises:
        DataError: whole lines come after a damaged one, which no kill leaves: nothing is cut.
    """
    damaged = 0
    if path.exists():
        with boundary(StorageError, f"cannot read {path}", OSError), path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not is_whole(line, _is_object):
                    damaged = damaged or number
                elif damaged:
                    raise DataError(
                        f"{path}, line {damaged}: no JSON object, and whole lines come after it. Mend or remove that "
                        "line; those after it would be lost"
                    )
    return keep_lines(path, _is_object)


def _is_object(line: Any) -> bool:
    return isinstance(line, dict)


def read_lines(path: Path) -> Iterator[Json]:
    """The lines of a file, one at a time."""
    with boundary(StorageError, f"cannot read {path}", OSError), path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def write_whole(path: Path, lines: Iterator[Json]) -> int:
    """A file that is there whole or not at all; the number of its lines."""
    count = 0
    with boundary(StorageError, f"cannot write {path}", OSError), replacing(path) as unfinished:
        out = JsonLines(unfinished, private=True)
        for line in lines:
            out.write(line)
            count += 1
        out.close()
    return count


def claim(path: Path, identity: Mapping[str, Any]) -> None:
    """Note beside an output file what its lines come from, or compare with what was noted.

    Raises:
        ConfigError: the file was begun from something else.
    """
    note = path.with_name(f".{path.stem}.source.json")
    current: Json = {key: same_path(value) for key, value in json.loads(json.dumps(redact_values(identity))).items()}
    if path.exists() and note.exists():
        before = read_json(note)
        changed = [key for key in (*before, *current) if same_path(before.get(key)) != current.get(key)]
        if changed:
            raise ConfigError(
                f"{path} was begun with {changed[0]} = {before.get(changed[0])!r}, and it is now "
                f"{current.get(changed[0])!r}: its lines would not belong together. Say another run_dir, "
                f"or delete {path}"
            )
    write_json(note, current)


async def answer(
    path: Path,
    tasks: Sequence[Task],
    produce: Produce,
    writer: Callable[[RolloutGroup], Json],
    *,
    window: int,
    max_failed_share: float,
    live: bool | None = None,
    stats: Callable[[], EngineStats] = EngineStats,
) -> None:
    """Append a line per task to ``path``, from the first task that has none, in the order of the tasks.

    Args:
        window: tasks in flight at once; no more results than that wait in memory.
        max_failed_share: of the rollouts of a block; above it the run stops before the block is written.
        live: how the progress is shown (``open_progress``).

    Raises:
        RewardError: too many rollouts failed.
    """
    done = repair(path)
    out = JsonLines(path, private=True)
    places = iter(range(done, len(tasks)))
    flying: deque[asyncio.Task[RolloutGroup]] = deque()
    block: list[RolloutGroup] = []
    recent: list[Rollout] = []
    counted = EngineStats()
    told, since = done, time.monotonic()
    with ExitStack() as stack:
        stack.callback(out.close)
        progress = stack.enter_context(open_progress(len(tasks), start=done, live=live))
        try:
            while done + len(block) < len(tasks):
                while len(flying) < window and (place := next(places, None)) is not None:
                    flying.append(asyncio.ensure_future(produce(place, tasks[place])))
                block.append(await flying.popleft())
                rollouts = [r for group in block for r in group.rollouts]
                if len(rollouts) < BLOCK and done + len(block) < len(tasks):
                    continue
                # A last, short block is judged as the end of one of which the rest is good, as what is written was.
                good = [Rollout(tasks[0])] * (BLOCK - len(rollouts)) if done else []
                check_failed([*good, *rollouts], max_failed_share)
                for group in block:
                    out.write(writer(group))
                done += len(block)
                recent, block = recent + rollouts, []
                seconds = time.monotonic() - since
                if seconds > EVERY or done == len(tasks):
                    now = stats()
                    progress.step(done, _measured(recent, now.since(counted), seconds), seconds / (done - told))
                    counted = now
                    recent, told, since = [], done, time.monotonic()
        finally:
            for running in flying:
                running.cancel()
            await asyncio.gather(*flying, return_exceptions=True)


def _measured(rollouts: Sequence[Rollout], stats: EngineStats, seconds: float) -> dict[str, float]:
    found = reward_metrics(rollouts)
    found["completion_tokens"] = sum(r.num_sampled for r in rollouts) / max(1, len(rollouts))
    if stats.sampled_tokens:
        found["tokens_per_second"] = stats.sampled_tokens / seconds
    if 0 < stats.attainable_seconds <= seconds:
        found["limit_share"] = stats.attainable_seconds / seconds
    return found


def window_of(max_running: int, n: int) -> int:
    """Tasks in flight that keep an engine full while the first of them is waited for."""
    return max(1, ceil(2 * max_running / n))


def given_records(task: Task, column: str | None) -> list[Json]:
    """The completions of a data line: text, or a list of texts, messages or records that have a ``completion``.

    Raises:
        DataError: there are none.
    """
    names = (column,) if column else ("completion", "completions")
    value: Any = next((task.columns[name] for name in names if name in task.columns), None)
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    records = [_given(item) for item in items]
    if not records or None in records:
        raise DataError(
            f"task {task.id}: no completion to score in {' or '.join(repr(n) for n in names)} (data.completion); "
            "it is text, a list of texts, or what tunesmith generate wrote"
        )
    return cast("list[Json]", records)


def _given(item: Any) -> Json | None:
    if isinstance(item, str):
        return {"completion": item}
    if isinstance(item, dict):
        record = cast("Json", item)
        if isinstance(record.get("completion"), str):
            return record
        if record.get("role") == "assistant" and isinstance(record.get("content"), str):
            return {"completion": record["content"]}
    return None


def score_given(scorer: Scorer, column: str | None, encode: Callable[[str, bool], list[int]]) -> Produce:
    """Makes the rollouts of a line's completions and has them scored.

    Args:
        encode: token ids of a completion's text; with True, ended as the model ends an answer.
    """

    async def produce(place: int, task: Task) -> RolloutGroup:
        del place
        records = given_records(task, column)
        rollouts: list[Rollout] = []
        for record in records:
            rollout = Rollout(task)
            rollout.observe(task.prompt_ids)
            reason = record.get("finish_reason", "stop")
            ids = encode(record["completion"], reason == "stop")
            rollout.act(Completion(ids, [0.0] * len(ids), [0] * len(ids), reason))
            rollouts.append(rollout)
        await scorer.score(rollouts, [record["completion"] for record in records])
        return RolloutGroup(task, rollouts)

    return produce


def scored_line(group: RolloutGroup, column: str | None) -> Json:
    """The data line with rewards beside its completions."""
    task = group.task
    records = given_records(task, column)
    judged = [record | scores_of(rollout) for record, rollout in zip(records, group.rollouts, strict=True)]
    name = column or ("completion" if "completion" in task.columns else "completions")
    line = {"prompt": task.prompt, **task.columns}
    if isinstance(task.columns[name], list):
        return line | {"completions": judged}
    return line | scores_of(group.rollouts[0])
