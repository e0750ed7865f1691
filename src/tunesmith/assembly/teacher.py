"""A run's teacher, and the comparison of a student with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from tunesmith.assembly.common import load_frozen, load_tokenizer
from tunesmith.config.commands import DistillConfig, OfflineDistillConfig, SampledDistillConfig
from tunesmith.data.forest import Forest, Predictions
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.teacher import check_same_vocabulary, predict_with_teacher
from tunesmith.parallel.host_weights import HostWeights


def load_teacher(config: DistillConfig | OfflineDistillConfig, tokenizer: Any) -> CausalLM:
    """The frozen teacher.

    Raises:
        ModelError: the teacher cannot be loaded, or its vocabulary is not the student's.
    """
    path, section = config.teacher.path, config.model
    there = section.model_copy(update={"path": path, "chat_template": None})
    theirs = load_tokenizer(config.model_copy(update={"model": there}))
    check_same_vocabulary(tokenizer, theirs, (section.path, path))
    return load_frozen(config, path, theirs)


def compare_with(
    teacher: CausalLM, config: SampledDistillConfig | OfflineDistillConfig
) -> Callable[[CausalLM, Forest], Predictions]:
    """A function to the student's predictions with its divergence from the teacher."""
    host = HostWeights.of(teacher.module, teacher.lean) if config.system.offload_reference else None
    temperature = config.rollout.temperature if isinstance(config, SampledDistillConfig) else 1.0
    return partial(
        predict_with_teacher,
        teacher=teacher,
        top_k=config.distill.top_k,
        temperature=temperature,
        chunk=config.system.logprob_chunk,
        weights=host.here if host else nullcontext,
    )
