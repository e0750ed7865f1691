"""The choices of ``[algorithm]``: what plans and rules read of a loss, an estimator or a
correction, and the KL and the shaping of rewards, which are settings alone.

The types of the first three are classes with formulas in ``learn.algorithms``; a family names the
base class of its types, and imports it when a run file chooses one.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.choice import Choice
from tunesmith.config.section import Section
from tunesmith.config.values import PositiveInt


class LossChoice(Choice):
    what = "loss"
    home = "tunesmith.learn.algorithms.losses.Loss"


class AdvantageChoice(Choice):
    what = "advantage"
    home = "tunesmith.learn.algorithms.advantages.Estimator"
    by_turn: ClassVar[bool] = False
    """Whether rewards of turns must be paid at the ends of their turns."""
    shaping: ClassVar[str] = ""
    """Why shaping a rollout's reward has no effect; empty if it has an effect."""


class CorrectionChoice(Choice):
    what = "correction"
    home = "tunesmith.learn.algorithms.corrections.Correction"
    unaltered_only: ClassVar[str] = ""
    """What it keeps, and would hardly keep of samples from an altered distribution; empty if the
    distribution may be altered."""


class KL(Choice):
    """How the policy is kept near a reference."""

    what = "KL"
    usual = "loss"


class NoKL(KL):
    """There is no reference model."""

    name = "none"
    use = "the policy may move far from its start"


class ReferenceKL(KL):
    """A KL to the starting model, or to a later copy of the policy."""

    coef: Annotated[float, Field(gt=0)] = 0.001
    """Weight β of the KL; verl's default."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adapt ``coef`` so that the KL per token stays near this value; none: a fixed coefficient."""
    horizon: PositiveInt | None = None
    """Rollouts over which an adaptive coefficient reacts, with ``target``; none: 10,000
    (arXiv:1909.08593)."""
    reference_every: PositiveInt | None = None
    """Steps after which the policy becomes the reference; none: the starting model throughout."""

    @model_validator(mode="after")
    def _adaptive(self) -> Self:
        if self.target is None and self.horizon is not None:
            raise ValueError(
                "horizon is that of an adaptive coefficient; add target, or leave horizon out"
            )
        return self


class KLInLoss(ReferenceKL):
    """A term of the loss, with a gradient."""

    name = "loss"
    formula = "loss + β·KL"
    use = "the usual choice"

    estimator: Literal["k2", "k3", "k1+", "k3+"] = "k3"
    """The estimator of the KL. k1 is not among them: its expected gradient is zero."""


class KLInReward(ReferenceKL):
    """A penalty on every token's reward, without a gradient."""

    name = "reward"
    formula = "r_t − β·KL_t"
    use = "estimators that read rewards token by token"

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator of the KL. Straight-through estimators differ only in the gradient."""


class OverlongRamp(Section):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13).

    The reward falls linearly over the last ``buffer`` tokens before the length limit.
    """

    buffer: PositiveInt | None = None
    """Tokens before ``rollout.max_new_tokens`` over which the reward falls; none: a fifth of it, as
    in DAPO."""
    factor: float = 1.0
    """The penalty at the limit."""

    def length(self, max_new_tokens: int) -> int:
        """Tokens of the ramp."""
        return self.buffer or max(1, max_new_tokens // 5)


class DynamicFilter(Section):
    """DAPO's dynamic sampling: groups with unequal scores are kept and, if there are bounds, those
    with a mean score strictly between them."""

    low: float | None = None
    """Lower bound of a group's mean score."""
    high: float | None = None
    """Upper bound of a group's mean score."""
    rest_epochs: PositiveInt | None = None
    """Epochs for which a prompt is skipped after its group was filtered; none: it returns in the
    next epoch."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} has to be below high = {self.high:g}")
        return self
