"""``[algorithm]`` and ``[critic]``: how rewards become gradients."""

# ``Algorithm`` narrows the types of its fields, which are frozen.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticUseDefault

from tunesmith.config.choice import Choice, on_is_a_table
from tunesmith.config.families import (
    KL,
    AdvantageChoice,
    CorrectionChoice,
    DynamicFilter,
    LossChoice,
    OverlongRamp,
    ReferenceKL,
)
from tunesmith.config.presets import find_preset
from tunesmith.config.section import Open, Section
from tunesmith.config.values import Count, GradNorm, Rate, Share, Text, at_most

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]


class AlgorithmSection(Section):
    """``[algorithm]``; omitted keys come from the preset (``plan.derive.algorithm``)."""

    families: ClassVar[Mapping[str, type[Choice]]] = {
        "advantage": AdvantageChoice,
        "loss": LossChoice,
        "kl": KL,
        "correction": CorrectionChoice,
    }

    name: Text = "grpo"
    """A preset, ``file.toml`` or ``file.py:NAME``: fills in every omitted key below."""
    advantage: Open[AdvantageChoice] = None
    """The advantage estimator."""
    loss: Open[LossChoice] = None
    """The policy loss."""
    aggregation: Open[Aggregation] = None
    """How token losses are averaged."""
    kl: Open[KL] = None
    """The KL to a reference: a loss term, a reward penalty, or none."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    correction: Open[CorrectionChoice] = None
    """Per-token weight that corrects for the difference between trainer and sampler (needs
    ``decoupled``)."""
    decoupled: Open[bool] = None
    """Recompute the old log-probabilities with the trainer before the update; None: if there is a
    correction, or if settings such as ``rollout.top_p`` alter the sampling distribution."""
    routing_replay: Literal["off", "sampler"] = "off"
    """Of a mixture of experts: whether scoring and training passes let each token choose the
    experts that it chose in the sampling engine (Tunesmith's own, or vLLM on GPUs)."""
    overlong: Annotated[
        OverlongRamp | Literal[False],
        BeforeValidator(on_is_a_table),
        Field(description="true, false, or a table with the keys buffer, factor"),
    ] = False
    """Lower the reward gradually over the last tokens before the length limit (DAPO)."""
    stop_properly: Annotated[float, Field(le=1)] | None = None
    """Factor on the reward of a rollout that hit the length limit; a negative value replaces the
    reward (ProRL)."""
    reward_clip: tuple[float, float] | None = None
    """Clip the reward to these two bounds, before any baseline."""
    mask_truncated: bool = False
    """Exclude rollouts whose last turn hit the length limit from the loss."""
    dynamic_filter: Annotated[
        DynamicFilter | Literal[False],
        BeforeValidator(on_is_a_table),
        Field(description="true, false, or a table with the keys low, high, rest_epochs"),
    ] = False
    """Replace groups whose rollouts all have equal scores, or whose mean score is not strictly
    between the bounds."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        find_preset(name)
        return name

    @field_validator(*families, mode="before")
    @classmethod
    def _typed(cls, value: object, info: ValidationInfo) -> object:
        """A table without a type gets the preset's type."""
        assert info.field_name is not None
        if value is None or "name" not in info.data:  # a bad name has its own error
            raise PydanticUseDefault
        preset: Any = find_preset(info.data["name"]).settings.get(info.field_name, "")
        table = isinstance(preset, Mapping)
        usual = cast(Mapping[str, Any], preset).get("type", "") if table else preset
        return cls.families[info.field_name].chosen(value, usual)

    @field_validator("reward_clip")
    @classmethod
    def _ordered(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] >= bounds[1]:
            raise ValueError(f"{list(bounds)}: the lower bound comes first")
        return bounds


class Algorithm(AlgorithmSection):
    """``[algorithm]`` with its preset: every key has a value."""

    advantage: AdvantageChoice = Field()
    loss: LossChoice = Field()
    aggregation: Aggregation = Field()
    kl: KL = Field()
    correction: CorrectionChoice = Field()
    decoupled: bool = Field()

    @property
    def needs(self) -> frozenset[str]:
        """Data that the training loop must provide (keys of ``NEEDS``)."""
        return self.advantage.needs | self.loss.needs

    @property
    def reference(self) -> ReferenceKL | None:
        """The KL to a reference, if any; samples then need ``ref_logprobs``."""
        return self.kl if isinstance(self.kl, ReferenceKL) else None


class CriticSection(Section):
    """``[critic]``: the value model of an estimator that needs one (``gae``, ``vapo``)."""

    path: str | None = None
    """A language model, reward model or critic to start from; None: the policy's model, with a zero
    head."""
    shared_trunk: bool = False
    """A value head on the policy instead of a separate model; one backward pass trains both."""
    value_coef: Open[Annotated[float, Field(gt=0)]] = None
    """With ``shared_trunk``: weight of the value loss relative to the policy loss."""
    value_clip: Annotated[float, Field(ge=0)] = 0.5
    """How far a value may move from its old value; 0 is off."""
    lr: Open[Rate] = None
    """Learning rate of the critic, or of the head with ``shared_trunk``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Share = 0.0
    warmup_steps: Count = 0
    max_grad_norm: GradNorm = 1.0
    passes_per_batch: Open[Annotated[int, Field(gt=0), at_most(10_000)]] = None
    """Passes of the critic over one rollout batch; None: as many as the policy's."""
    freeze_actor_steps: Count = 0
    """Steps in which only the critic learns."""
