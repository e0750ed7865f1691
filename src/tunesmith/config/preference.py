"""The run files of reward models and preference optimisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.config.schema import RunConfig
from tunesmith.config.section import Section

Weight = Annotated[float, Field(ge=0)]


class RMSection(Section):
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """``logexp`` ignores a margin in the data."""


class ReferenceSection(Section):
    beta: Annotated[float, Field(gt=0)] = 0.1
    """The reward per unit of log-ratio to the reference."""
    precompute_reference: bool = False
    """Score the data with the reference once, before training, instead of keeping a second model."""


class DPOSection(ReferenceSection):
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of mislabelled pairs (cDPO)."""
    nll_coef: Weight = 0.0
    """Weight of the chosen answer's mean negative log-probability."""


class KTOSection(ReferenceSection):
    desirable_weight: Weight = 1.0
    undesirable_weight: Weight = 1.0


class PRMSection(Section):
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text after each step; the label is predicted at its last token."""
    good: str = "+"
    """The label of a good step; one token."""
    bad: str = "-"


class ScoreConfig(RunConfig):
    """A command that trains a score model; a sample has one token more than its sequence, for the prediction."""


class RMConfig(ScoreConfig):
    command = "rm"
    goal = "pairs"
    rm: RMSection = RMSection()


class DPOConfig(RunConfig):
    command = "dpo"
    goal = "pairs"
    dpo: DPOSection = DPOSection()


class KTOConfig(RunConfig):
    command = "kto"
    goal = "judged"
    kto: KTOSection = KTOSection()


class PRMConfig(ScoreConfig):
    command = "prm"
    goal = "steps"
    prm: PRMSection = PRMSection()
