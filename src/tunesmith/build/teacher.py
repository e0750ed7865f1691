"""The teacher of a run, and what a run does with one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tunesmith.build.common import load_frozen, load_tokenizer
from tunesmith.config.distillation import DistillConfig, OfflineDistillConfig, SampledDistillConfig
from tunesmith.environments.rewards import RewardSet
from tunesmith.types import Rollout, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunesmith.backends.base import LossFn
    from tunesmith.data.forest import Forest, Predictions
    from tunesmith.models.causal_lm import CausalLM


class Unrewarded(RewardSet):
    """For samples that teach by themselves: each counts, with a reward of 0 that nobody reads."""

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        del texts
        for rollout in rollouts:
            if rollout.status is Status.OK and rollout.reward is None:
                rollout.reward = 0.0

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {name: value for name, value in super().metrics(rollouts).items() if not name.startswith("reward")}


def load_teacher(config: DistillConfig | OfflineDistillConfig, tokenizer: Any) -> CausalLM:
    """The frozen teacher.

    Raises:
        ModelError: it cannot be loaded, or its tokens are not the student's.
    """
    from tunesmith.models.teacher import check_same_vocabulary

    path, section = config.teacher.path, config.model
    there = section.model_copy(update={"path": path, "chat_template": None})
    theirs = load_tokenizer(config.model_copy(update={"model": there}))
    check_same_vocabulary(tokenizer, theirs, (section.path, path))
    return load_frozen(config, path, theirs)


def compare_with(
    teacher: CausalLM, config: SampledDistillConfig | OfflineDistillConfig
) -> Callable[[CausalLM, Forest], Predictions]:
    """The student's predictions with its distance from the teacher."""
    from tunesmith.models.teacher import predict_with_teacher

    assert config.distill.top_k, "not resolved"
    temperature = config.rollout.temperature if isinstance(config, SampledDistillConfig) else 1.0
    return partial(
        predict_with_teacher,
        teacher=teacher,
        top_k=config.distill.top_k,
        temperature=temperature,
        chunk=config.system.logprob_chunk,
    )


def objective_with_teacher(config: Any) -> LossFn | None:
    """What is minimised in place of a policy loss, where a run has such a thing."""
    from tunesmith.algorithms.distillation import distillation_objective

    return distillation_objective(1.0) if isinstance(config, SampledDistillConfig) else None
