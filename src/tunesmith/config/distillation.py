"""The run files of distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.schema import PositiveInt, RLConfig, RunConfig, SFTConfig, Share
from tunesmith.config.section import Section, derived


class TeacherSection(Section):
    path: str
    """A directory or a hub name; it must have the student's tokens."""


class DistillSection(Section):
    mode: Literal["on_policy", "sampled", "offline"] = "on_policy"
    """Reverse KL on the student's samples; forward KL on the student's samples; forward KL on given answers."""
    top_k: PositiveInt = derived()
    """How many of the teacher's likeliest tokens a forward KL compares one by one; the others count together."""
    alpha: Share = derived()
    """Offline: weight of the KL; 1 − alpha is the weight of the given answers' negative log-probability."""


class OnPolicyAlgorithm(AlgorithmSection):
    name: str = "distill"


class SampledAlgorithm(OnPolicyAlgorithm):
    name: str = "reinforce"


class DistillConfig(RLConfig):
    """``mode = "on_policy"``."""

    command = "distill"
    teacher: TeacherSection
    distill: DistillSection = DistillSection()
    algorithm: OnPolicyAlgorithm = OnPolicyAlgorithm()  # pyright: ignore[reportIncompatibleVariableOverride]


class SampledDistillConfig(DistillConfig):
    """``mode = "sampled"``: only ``aggregation`` is read of the algorithm."""

    algorithm: SampledAlgorithm = SampledAlgorithm()  # pyright: ignore[reportIncompatibleVariableOverride]


class OfflineDistillConfig(SFTConfig):
    """``mode = "offline"``."""

    command = "distill"
    teacher: TeacherSection
    distill: DistillSection = DistillSection()


def distill_kind(data: Mapping[str, Any]) -> type[RunConfig]:
    """The configuration of a run file's tree, by ``distill.mode``; a wrong mode is refused when it is read."""
    section = data.get("distill")
    kinds = {"sampled": SampledDistillConfig, "offline": OfflineDistillConfig}
    return kinds.get(str(section.get("mode")) if isinstance(section, Mapping) else "", DistillConfig)
