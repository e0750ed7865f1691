"""A teacher on a server, with the checks of its vocabulary and of what the server can say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, DataError, RewardError, about
from tunesmith.learn.data.prompts import PromptEncoder
from tunesmith.models.embedding_rows import rows_of
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.waits import long_wait
from tunesmith.run.loop.teacher import Teacher
from tunesmith.run.placement.models import TokenizerSpec
from tunesmith.run.placement.opening import OpenRun
from tunesmith.types import Sample, Task

if TYPE_CHECKING:
    from tunesmith.run.loop.served_teacher import ServedTeacher


def teacher_of_samples(run: OpenRun[OfflineDistillConfig, Sample]) -> ServedTeacher:
    """See ``_served``."""
    return _served(run, run.train.items[0])


def teacher_of_rollouts(run: OpenRun[RLConfig, Task]) -> Teacher:
    """See ``_served``."""
    plan: AnyPlan = run.plan
    said: DistillConfig = plan.said
    column = said.teacher.prompt

    def prompt(task: Task) -> list[int]:
        shown = task.columns.get(str(column))
        if not isinstance(shown, str | list) or not shown:
            raise DataError(f"task {task.id} has no prompt in '{column}' (teacher.prompt)")
        return PromptEncoder.of(said.data, run.tokenizer, [shown]).ids(shown)

    first = run.train.items[0]
    ids = list(prompt(first) if column else first.prompt_ids)
    asked = Sample([*ids, ids[-1]], [False, *(True for _ in ids)])
    return Teacher(_served(run, asked), prompt if column else None)


def _served(
    run: OpenRun[RLConfig, Task] | OpenRun[OfflineDistillConfig, Sample], first: Sample
) -> ServedTeacher:
    """The server of a run's teacher, which has been asked about ``first``.

    Raises:
        ConfigError: its key is not set, or it cannot say what the run needs.
        ModelError: its vocabulary is not the student's.
    """
    from tunesmith.models.teacher import check_same_vocabulary
    from tunesmith.run.loop.served_teacher import ServedTeacher

    plan: AnyPlan = run.plan
    said: DistillConfig | OfflineDistillConfig = plan.said
    section = said.teacher
    if section.token_env and not os.environ.get(section.token_env, "").strip():
        raise ConfigError(
            f"the environment variable {section.token_env} (teacher.token_env) is not set",
            keys=("teacher.token_env",),
        )
    trusts = said.model.trust_remote_code
    theirs = TokenizerSpec(section.path, "teacher.path", trust_remote_code=trusts).build()
    with about("teacher.path"):
        check_same_vocabulary(run.tokenizer, theirs, (said.model.path, section.path))
    rows = rows_of(run.tokenizer)
    compared = plan.training.distillation
    top_k = min(compared.top_k, rows or compared.top_k) if compared else None
    teacher = ServedTeacher(section, top_k, rows)
    try:
        with long_wait("asking the teacher (teacher.url)"):
            teacher([first])
    except RewardError as error:
        remedy = (
            f". distill.mode = '{said.distill.mode}' needs the {top_k} likeliest tokens at each "
            "place, by number (logprobs): vLLM gives them (--max-logprobs), and tunesmith serve. "
            "Lower distill.top_k, or use mode = 'on_policy'"
        )
        keys = ("teacher.url", "distill.top_k") if top_k else ("teacher.url",)
        raise ConfigError(f"{error}{remedy if top_k else ''}", keys=keys) from None
    return teacher
