"""A teacher on a server, with the check of its vocabulary."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tunesmith.config.commands import DistillConfig
from tunesmith.errors import ConfigError, about
from tunesmith.learn.data.prompts import PromptEncoder
from tunesmith.run.placement.models import TokenizerSpec
from tunesmith.types import Prompt

if TYPE_CHECKING:
    from tunesmith.run.loop.served_teacher import ServedTeacher


def served_teacher(said: DistillConfig, tokenizer: Any) -> ServedTeacher:
    """Raises ConfigError, ModelError: its key is not set, or its vocabulary is not the
    student's."""
    from tunesmith.models.teacher import check_same_vocabulary
    from tunesmith.run.loop.served_teacher import ServedTeacher

    section = said.teacher
    if section.token_env and not os.environ.get(section.token_env, "").strip():
        raise ConfigError(
            f"the environment variable {section.token_env} (teacher.token_env) is not set",
            keys=("teacher.token_env",),
        )
    trusts = said.model.trust_remote_code
    theirs = TokenizerSpec(section.path, "teacher.path", trust_remote_code=trusts).build()
    with about("teacher.path"):
        check_same_vocabulary(tokenizer, theirs, (said.model.path, section.path))

    def encode(prompt: Prompt) -> list[int]:
        return PromptEncoder.of(said.data, tokenizer, [prompt]).ids(prompt)

    return ServedTeacher(section, encode)
