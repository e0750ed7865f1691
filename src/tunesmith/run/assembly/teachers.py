"""The teachers that are asked beside the trainer's passes over a batch, with the checks of their
vocabularies and of what servers can say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig, TeacherSection
from tunesmith.config.judges import POLICY
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, DataError, ModelError, RewardError, about, nearest
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.chat import end_of_turn_id
from tunesmith.learn.data.chat_defaults import set_defaults
from tunesmith.learn.data.prompts import PromptEncoder
from tunesmith.learn.data.values import read_prompt, row_of
from tunesmith.models.embedding_rows import rows_of
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.waits import long_wait
from tunesmith.run.assembly.opening import OpenRun
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.teacher import (
    Score,
    Teacher,
    TeacherByColumn,
    TeacherOfText,
    TeacherOfTokens,
    Tongue,
)
from tunesmith.run.specs.base import Report
from tunesmith.run.specs.models import TokenizerSpec
from tunesmith.types import Sample, Task, Tokenizer

if TYPE_CHECKING:
    from tunesmith.run.loop.served_teacher import ServedTeacher

DistillRun = OpenRun[RLConfig, Task] | OpenRun[OfflineDistillConfig, Sample]
Distilling = DistillConfig | OfflineDistillConfig


def teacher_of_samples(run: OpenRun[OfflineDistillConfig, Sample]) -> ServedTeacher:
    """The server of a run on given answers.

    Raises:
        ConfigError: see ``_served``.
        ModelError: its vocabulary is not the student's.
    """
    _check_tokens(run.plan.said, run.tokenizer, _tokenizer(run.plan.said))
    return _served(run, run.plan.said.teacher, run.train.items[0])


def teacher_of_rollouts(
    run: OpenRun[RLConfig, Task], learner: Learner, report: Report
) -> Teacher | None:
    """None: there is none, or the trainer asks it in its own passes.

    Raises:
        ConfigError: see ``_served``.
        ModelError: it has other tokens than the student, and the run needs the same.
        DataError: the first task has no prompt for it.
    """
    plan: AnyPlan = run.plan
    if not plan.kind.distils or plan.kind.teacher == "microbatch":
        return None
    said: DistillConfig = plan.said
    section = said.teacher
    own = section.path == POLICY
    theirs = run.tokenizer if own else _tokenizer(said)
    same_tokens = own or run.tokenizer.get_vocab() == theirs.get_vocab()
    if same_tokens and not theirs.chat_template:
        theirs.chat_template = run.tokenizer.chat_template
    prompt = _prompts(said, theirs)
    first = run.train.items[0]
    text = plan.training.distillation is None and not same_tokens
    if not (text or own):
        _check_tokens(said, run.tokenizer, theirs)
    if not (text or own or section.url or section.prompt):
        return None
    if text and said.environment.used:
        raise ModelError(
            f"the teacher '{section.path}' has other tokens than the student, and then scores "
            "single answers, not episodes; use a teacher of the student's family",
            keys=("teacher.path", "environment.path"),
        )
    if text:
        report("the teacher has other tokens than the student: it scores the text of answers")

    def with_score(score: Score) -> Teacher:
        if not text:
            return TeacherOfTokens(score, prompt if section.prompt else None)
        chat = PromptEncoder.of(said.data, theirs, [first.prompt]).template is not None
        return TeacherOfText(score, prompt, _tongue(run.tokenizer), _tongue(theirs, chat=chat))

    if section.url is None:
        return with_score(_scored_here(learner, reference=not own))
    seen = prompt(first) if text or section.prompt else list(first.prompt_ids)
    asked = Sample([*seen, seen[-1]], [False, *(True for _ in seen)])
    several = section.by_name()
    if not several:
        return with_score(_served(run, section, asked))
    _check_names(run.train.items, section.column, several)
    teachers = {name: with_score(_served(run, one, asked)) for name, one in several.items()}
    return TeacherByColumn(section.column, teachers)


def _check_names(tasks: Sequence[Task], column: str, names: Mapping[str, TeacherSection]) -> None:
    """Raises DataError: a task names none of the teachers."""
    for task in tasks:
        name = task.columns.get(column)
        if not isinstance(name, str) or name not in names:
            where = f"task {task.id} has {name!r} in the column '{column}' (teacher.column)"
            hint = nearest(str(name), names)
            raise DataError(f"{where}; the teachers of teacher.url are {', '.join(names)}.{hint}")


def _tokenizer(said: Distilling) -> Any:
    trusts = said.model.trust_remote_code
    built = TokenizerSpec(said.teacher.path, "teacher.path", trust_remote_code=trusts).build()
    for name, value in (said.data.chat_template_kwargs or {}).items():
        with suppress(ConfigError):  # the teacher's own template may not read it
            set_defaults(built, None, {name: value})
    return built


def _check_tokens(said: Distilling, ours: Tokenizer, theirs: Tokenizer) -> None:
    from tunesmith.models.teacher import check_same_vocabulary

    with about("teacher.path"):
        check_same_vocabulary(ours, theirs, (said.model.path, said.teacher.path))


def _prompts(said: DistillConfig, tokenizer: Tokenizer) -> Callable[[Task], list[int]]:
    """A function to the prompt that a teacher with this tokenizer sees."""
    column = said.teacher.prompt

    def prompt(task: Task) -> list[int]:
        shown = read_prompt(row_of(task), column) if column else task.prompt
        encoder = PromptEncoder.of(said.data, tokenizer, [shown])
        told = encoder.template is not None and encoder.template.takes_tools
        return encoder.ids(shown, task.tools if told else None)

    return prompt


def _tongue(tokenizer: Tokenizer, *, chat: bool = True) -> Tongue:
    ends = (end_of_turn_id(tokenizer) if chat else None, tokenizer.eos_token_id)
    return Tongue(tokenizer, tuple(dict.fromkeys(end for end in ends if end is not None)))


def _scored_here(learner: Learner, *, reference: bool) -> Score:
    """The trainer's frozen teacher, or the policy itself."""

    def score(samples: Sequence[Sample]) -> Mapping[str, Floats]:
        return {"ref_logprobs": learner.score(Batch.of(samples), reference=reference, longer=True)}

    return score


def _served(run: DistillRun, section: TeacherSection, first: Sample) -> ServedTeacher:
    """The server of a teacher, which has been asked about ``first``.

    Raises:
        ConfigError: its key is not set, or it cannot say what the run needs.
    """
    from tunesmith.run.loop.served_teacher import ServedTeacher

    plan: AnyPlan = run.plan
    said: Distilling = plan.said
    if section.token_env and not os.environ.get(section.token_env, "").strip():
        raise ConfigError(
            f"the environment variable {section.token_env} (teacher.token_env) is not set",
            keys=("teacher.token_env",),
        )
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
