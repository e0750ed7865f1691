"""The run files of distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.schema import PositiveInt, RLConfig, RunConfig, SFTConfig, Share
from tunesmith.config.section import Section, derived


class TeacherSection(Section):
    path: str
    """A directory or a hub name; the teacher must have the student's vocabulary."""


class DistillSection(Section):
    mode: Literal["on_policy", "sampled", "offline"] = "on_policy"
    """Reverse KL on the student's samples; forward KL on the student's samples; forward KL on given answers."""
    top_k: PositiveInt = derived()
    """How many of the teacher's most likely tokens a forward KL compares individually; the rest count as one."""
    alpha: Share = derived()
    """Offline only: weight of the KL; the given answers' negative log-probability has weight 1 − alpha."""


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
    """``mode = "sampled"``: of the algorithm, only ``aggregation`` is used."""

    algorithm: SampledAlgorithm = SampledAlgorithm()  # pyright: ignore[reportIncompatibleVariableOverride]


class OfflineDistillConfig(SFTConfig):
    """``mode = "offline"``."""

    command = "distill"
    teacher: TeacherSection
    distill: DistillSection = DistillSection()


def distill_kind(data: Mapping[str, Any]) -> type[RunConfig]:
    """The configuration class of a run file's tree, by ``distill.mode``; an invalid mode is refused later, on load."""
    section = data.get("distill")
    kinds = {"sampled": SampledDistillConfig, "offline": OfflineDistillConfig}
    return kinds.get(str(section.get("mode")) if isinstance(section, Mapping) else "", DistillConfig)
