"""Checks and derived settings of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.algorithms.kl import KLInReward
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.distillation import DistillConfig, OfflineDistillConfig, SampledDistillConfig
from tunesmith.config.resolved import given_in, unread
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.filling import Filling

TOP_K = 64
ALPHA = 0.5


def distill_problems(config: RunConfig) -> Iterator[str]:
    """Problems that do not depend on how the algorithm resolves."""
    if not isinstance(config, DistillConfig | OfflineDistillConfig):
        return
    if known(config.distill, "alpha") == 0:
        yield "distill.alpha = 0 leaves the teacher out; use tunesmith sft, or a value above 0"
    measured = not isinstance(config, DistillConfig) or config.reward.given or config.environment.path
    if config.data.eval is not None and not measured:
        yield "data.eval without [reward]: answers would be sampled and nothing measured; add a reward or leave it out"
    if isinstance(config, SampledDistillConfig):
        keys = [key for key in given_in(config, "algorithm") if key != "algorithm.aggregation"]
        yield from unread(config, keys, "with mode = 'sampled', which has an objective of its own; leave it out")


def teacher_problems(config: RLConfig, algorithm: AlgorithmSection) -> Iterator[str]:
    """Whether a resolved algorithm and the run's teacher need each other."""
    wants = "teacher" in algorithm.needs
    if wants and not isinstance(config, DistillConfig):
        yield (
            f"algorithm.advantage = '{algorithm.advantage.name}' learns from a teacher: train with "
            "tunesmith distill, and set teacher.path"
        )
    if not isinstance(config, DistillConfig) or isinstance(config, SampledDistillConfig):
        return
    if not wants:
        yield f"algorithm.advantage = '{algorithm.advantage.name}' does not look at the teacher; leave [algorithm] out"
    elif not isinstance(algorithm.kl, KLInReward) or algorithm.kl.estimator != "k1":
        yield "distillation learns from the KL to the teacher in the reward, by k1; leave algorithm.kl as it is"


def derive_distill(filling: Filling[Any]) -> None:
    config = filling.config
    if isinstance(config, SampledDistillConfig | OfflineDistillConfig):
        filling.fill("distill.top_k", TOP_K, "usually nearly all of the probability")
    if isinstance(config, OfflineDistillConfig):
        filling.fill("distill.alpha", ALPHA, "equal weight for the teacher and the given answers")
