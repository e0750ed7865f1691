"""``output.kind = "score"``: rewards of completions that the data holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from tunesmith.config.commands import GenerateConfig
from tunesmith.errors import DataError
from tunesmith.learn.data.chat import end_of_turn_ids
from tunesmith.learn.data.formats import Example
from tunesmith.learn.data.prompts import choose_template
from tunesmith.learn.data.tokens import encode
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.models.embedding_rows import without_row
from tunesmith.plan.plan import Plan
from tunesmith.records.foreign import json_or
from tunesmith.run.assembly.rewards import add_rewards
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.offline.answering import BLOCK, answer, window_of
from tunesmith.run.offline.lines import Json, repair, scores_of
from tunesmith.run.offline.unfinished import Unfinished
from tunesmith.run.offline.watch import JobWatch
from tunesmith.run.placement.here import Here
from tunesmith.types import Completion, Rollout, RolloutGroup, Task, Tokenizer


def score(
    plan: Plan[GenerateConfig],
    tokenizer: Tokenizer,
    rewards: RewardSet,
    tasks: Sequence[Task],
    out: Path,
    watch: JobWatch,
) -> None:
    """Append a line with rewards for each line of data that ``out`` lacks.

    Each completion is scored as a rollout, with the model's end token unless it was cut off.
    """
    config = plan.said
    column = config.data.completion
    assert config.reward is not None, "there are rewards"
    for task in tasks:
        records = given_records(task, column)
        for ids in encode(tokenizer, [record["completion"] for record in records]):
            problem = without_row(tokenizer, ids)
            if problem:
                raise DataError(f"task {task.id}: in its completion, {problem}")
    examples = [Example(task.id, task.id, prompt=task.prompt) for task in tasks]
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    if choose_template(config.data, tokenizer, examples) is not None:
        end = end_of_turn_ids(tokenizer)

    async def produce(_: int, task: Task, __: Unfinished) -> RolloutGroup:
        records = given_records(task, column)
        rollouts: list[Rollout] = []
        for record in records:
            rollout = Rollout(task)
            rollout.observe(task.prompt_ids)
            reason = record.get("finish_reason", "stop")
            ids = encode(tokenizer, [record["completion"]])[0]
            if reason == "stop":
                ids = [*ids, *end]
            rollout.act(Completion(ids, [0.0] * len(ids), [0] * len(ids), reason))
            rollouts.append(rollout)
        await rewards.score(rollouts, [record["completion"] for record in records])
        return RolloutGroup(task, rollouts)

    if repair(out) < len(tasks):
        report = partial(print, flush=True)
        add_rewards(rewards, plan, tokenizer, report, Here(), out.parent, None)
        watch.follow(config, tokenizer, EngineStats, 1)
        answer(
            out,
            tasks,
            produce,
            partial(_line, column=column),
            window=window_of(BLOCK, 1),
            max_failed_share=config.reward.max_failed_share,
            watch=watch,
        )


def given_records(task: Task, column: str | None) -> list[Json]:
    """The completions of a data line: text, or a list of texts, messages or records that have a
    ``completion``.

    Raises:
        DataError: there are none.
    """
    names = (column,) if column else ("completion", "completions")
    value: Any = next((_value(task.columns, name) for name in names if name in task.columns), None)
    if isinstance(value, str) and task.columns.get("finish_reason"):  # a line of one completion
        value = {"completion": value, "finish_reason": task.columns["finish_reason"]}
    items: list[Any] = value if isinstance(value, list) else [value]
    records = [_record(item) for item in items]
    if not records or None in records:
        raise DataError(
            f"task {task.id}: no completion to score in {' or '.join(repr(n) for n in names)} "
            "(data.completion); it is text, a list of texts, or what tunesmith generate wrote"
        )
    return cast("list[Json]", records)


def _value(columns: Mapping[str, Any], name: str) -> object:
    """A column's value; a list of completions may be JSON text, as in CSV files."""
    value: Any = columns[name]
    read: object = json_or(value, None) if isinstance(value, str) else None
    items: list[object] = read if isinstance(read, list) else []
    texts = all(isinstance(item, str) for item in items)
    listed = bool(items) and None not in map(_record, items)
    return items if listed and (name == "completions" or not texts) else value


def _record(item: object) -> Json | None:
    match item:
        case str():
            return {"completion": item}
        case {"completion": str()}:
            return cast("Json", item)
        case {"role": "assistant", "content": str() as content}:
            return {"completion": content}
        case _:
            return None


def _line(group: RolloutGroup, column: str | None) -> Json:
    """The data line with the rewards of its completions."""
    columns = group.task.columns
    line = {"prompt": group.task.prompt, **columns}
    name = column or ("completion" if "completion" in columns else "completions")
    if not isinstance(_value(columns, name), list):
        return line | scores_of(group.rollouts[0])
    records = zip(given_records(group.task, column), group.rollouts, strict=True)
    return line | {"completions": [record | scores_of(rollout) for record, rollout in records]}
