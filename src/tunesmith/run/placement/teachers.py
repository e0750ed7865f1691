"""A teacher on a server, with the check of its vocabulary."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tunesmith.config.commands import DistillConfig
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, about
from tunesmith.learn.data.prompts import PromptEncoder
from tunesmith.plan.plan import AnyPlan
from tunesmith.run.placement.models import TokenizerSpec
from tunesmith.run.placement.opening import OpenRun
from tunesmith.types import Prompt, Task

if TYPE_CHECKING:
    from tunesmith.run.loop.served_teacher import ServedTeacher


def served_teacher(run: OpenRun[RLConfig, Task]) -> ServedTeacher:
    """Raises ConfigError, ModelError: its key is not set, or its vocabulary is not the
    student's."""
    from tunesmith.models.teacher import check_same_vocabulary
    from tunesmith.run.loop.served_teacher import ServedTeacher

    plan: AnyPlan = run.plan
    said: DistillConfig = plan.said
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

    def encode(prompt: Prompt) -> list[int]:
        return PromptEncoder.of(said.data, run.tokenizer, [prompt]).ids(prompt)

    return ServedTeacher(section, encode)
