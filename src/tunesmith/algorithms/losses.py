"""Policy losses: one number per token, before any mean.

A loss takes a micro-batch and returns ``[N]`` values; the objective multiplies them with the weight column
(``aggregation``) and adds up. Losses over a sequence reduce within ``sample``, which a micro-batch never
cuts, and give every token of the sequence the sequence's loss: with ``seq_mean_token_mean`` weights that
adds up to the mean over sequences.

Everything here uses methods of the tensor, so that settings and the reference page can read the registry
without loading torch. A new loss is one function with one ``@policy_loss`` line.

Legend: ``d = logπ − logπ_old`` (clamped to ±20), ``ρ = exp(d)``, ``A`` advantage, ``sg`` stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tunesmith.algorithms.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""``d`` is clamped to this before it is exponentiated, as in verl and OpenRLHF."""


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """What losses read. Tokens outside ``keep`` are zero in every column and count in no mean."""

    logprobs: Tensor  # [N], with gradient
    old_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    keep: Tensor  # [N] bool
    sample: Tensor  # [N] int64, which sequence a token belongs to
    num_samples: int
    selected: Tensor | None = None  # [N], 1 where the covariance losses act
    group_logprob: Tensor | None = None  # [N], log of the group's expected sampling probability

    @property
    def log_ratio(self) -> Tensor:
        """``d``, ``[N]``."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean of ``values [N]`` over the kept tokens of each sequence, given to all its tokens ``[N]``."""
        kept = self.keep.to(values.dtype)
        totals = values.new_zeros(self.num_samples).index_add(0, self.sample, values * kept)
        counts = values.new_zeros(self.num_samples).index_add(0, self.sample, kept)
        return (totals / counts.clamp(min=1.0))[self.sample]


@dataclass(frozen=True, slots=True)
class LossParams:
    """Constants of the losses, named as in the settings; each loss reads its own (``Entry.settings``)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    ratio_cap: float = 20.0
    cov_kl_coef: float = 1.0


class TokenLoss(NamedTuple):
    """``loss [N]`` with its gradient; where the bounds took effect, ``[N]`` bool, if the loss has bounds."""

    loss: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None


LossFunction = Callable[[PolicyBatch, LossParams], TokenLoss]


POLICY_LOSSES: Registry[LossFunction] = Registry()
policy_loss = POLICY_LOSSES.register

CLIP: Mapping[str, float | None] = {"clip_low": 0.2, "clip_high": 0.2}
TIGHT_CLIP: Mapping[str, float | None] = {"clip_low": 3e-4, "clip_high": 4e-4}
SELECTION = frozenset({"selection"})


def _clipped(ratio: Tensor, advantages: Tensor, params: LossParams) -> TokenLoss:
    """PPO's pessimistic surrogate for any ratio."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high) * advantages
    acts = bounded > free
    return TokenLoss(free.maximum(bounded), acts & (ratio < 1.0), acts & (ratio > 1.0))


@policy_loss(
    "ppo",
    "max(−ρA, −clip(ρ, 1−ε_low, 1+ε_high)A); with dual clip min(·, −cA) where A < 0",
    "PPO, arXiv:1707.06347; dual clip arXiv:1912.09729",
    keys={**CLIP, "dual_clip": None},
)
def ppo(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """Clipped surrogate. Dual clip is off unless set (verl has it on with c = 3)."""
    token = _clipped(batch.log_ratio.exp(), batch.advantages, params)
    if params.dual_clip is None:
        return token
    bound = -params.dual_clip * batch.advantages
    dual = token.loss.minimum(bound).where(batch.advantages < 0, token.loss)
    return token._replace(loss=dual)


@policy_loss("gpg", "−A logπ", "GPG, arXiv:2504.02546")
@policy_loss("reinforce", "−A logπ", "Williams 1992")
def reinforce(batch: PolicyBatch, params: LossParams) -> TokenLoss:  # noqa: ARG001
    """The plain policy gradient, which is GPG's too. Off policy the correction column weighs it, as every loss."""
    return TokenLoss(-batch.advantages * batch.logprobs)


@policy_loss(
    "gspo",
    "−min(sA, clip(s, 1−ε_low, 1+ε_high)A), s = exp(mean_t d)",
    "GSPO, arXiv:2507.18071",
    keys=TIGHT_CLIP,
)
def gspo(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """Every token carries its sequence's loss; the ratio is that of the sequence, per token of length."""
    ratio = batch.sequence_mean(batch.log_ratio).exp()
    return _clipped(ratio, batch.sequence_mean(batch.advantages), params)


@policy_loss(
    "gspo_token",
    "ppo with ρ_t = sg(s)·exp(logπ_t − sg(logπ_t))",
    "GSPO-token, arXiv:2507.18071",
    keys=TIGHT_CLIP,
)
def gspo_token(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """GSPO's ratio with an advantage per token; the same gradient where the advantage is the sequence's."""
    ratio = batch.sequence_mean(batch.log_ratio).exp().detach()
    return _clipped(ratio * (batch.logprobs - batch.logprobs.detach()).exp(), batch.advantages, params)


@policy_loss(
    "gmpo",
    "−A exp(mean_t d̂), d̂ = d clipped to ±ε only where that lowers A·d",
    "GMPO, arXiv:2507.20673",
    keys={"clip_low": 0.4, "clip_high": 0.4},
)
def gmpo(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """Geometric mean of the ratios, clipped in log space on the side the advantage pushes to.

    An off-policy correction multiplies token by token here; verl takes its geometric mean.
    """
    advantages = batch.sequence_mean(batch.advantages)
    d, sign = batch.log_ratio, advantages.sign()
    bounded = d.clamp(-params.clip_low, params.clip_high)
    pessimistic = sign * (sign * d).minimum(sign * bounded)
    loss = -advantages * batch.sequence_mean(pessimistic).exp()
    acts = pessimistic != d
    return TokenLoss(loss, acts & (advantages < 0), acts & (advantages > 0))


@policy_loss(
    "gepo",
    "ppo per sequence with ratio p / (Σq² / Σq) over the group",
    "GEPO, arXiv:2508.17850",
    keys=CLIP,
    needs=frozenset({"group", "group_logprobs"}),
)
def gepo(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """The sampling probability in the ratio is its expectation over the group, which hardly ever vanishes.

    ``p`` and ``q`` are length-normalised sequence probabilities, ``exp(mean_t logπ)``, as in the authors'
    code; everything stays in log space.
    """
    assert batch.group_logprob is not None, "gepo reads the column group_logprob"
    log_ratio = batch.sequence_mean(batch.logprobs) - batch.group_logprob
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _clipped(ratio, batch.sequence_mean(batch.advantages), params)


@policy_loss(
    "cispo",
    "−sg(clip(ρ, 1−ε_low, 1+ε_high)) A logπ",
    "CISPO, MiniMax-M1, arXiv:2506.13585",
    keys={"clip_low": 1.0, "clip_high": 4.0},
)
def cispo(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """Clips the weight and keeps every token's gradient.

    The defaults bound the weight to [0, 5]: no lower bound, as in the paper, and ScaleRL's upper bound
    (arXiv:2510.13786). TRL's ``epsilon_high`` is the bound itself, 1 + ε_high here.
    """
    ratio = batch.log_ratio.detach().exp()
    bounded = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    return TokenLoss(-bounded * batch.advantages * batch.logprobs, ratio < bounded, ratio > bounded)


@policy_loss(
    "sapo",
    "−A (4/τ) σ(τ(ρ − 1)), τ by the sign of A",
    "SAPO, arXiv:2511.20347",
    keys={"tau_positive": 1.0, "tau_negative": 1.05},
)
def sapo(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """A smooth gate instead of a clip; slope 1 at ρ = 1."""
    advantages = batch.advantages
    tau = advantages.new_full(advantages.shape, params.tau_negative)
    tau = tau.masked_fill(advantages > 0, params.tau_positive)
    gate = (tau * (batch.log_ratio.exp() - 1.0)).sigmoid() * (4.0 / tau)
    return TokenLoss(-gate * advantages)


@policy_loss(
    "dppo_tv",
    "−A sg(min(ρ, c)) logπ · 1[π − π_old ≤ ε_high if A > 0, ≥ −ε_low otherwise]",
    "DPPO, arXiv:2602.04879",
    keys={"clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 20.0},
)
def dppo_tv(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """A trust region in probability (binary total variation) instead of in the ratio."""
    advantages = batch.advantages
    ratio = batch.log_ratio.detach().exp().clamp(max=params.ratio_cap)
    moved = batch.logprobs.detach().exp() - batch.old_logprobs.exp()
    high = (advantages > 0) & (moved > params.clip_high)
    low = (advantages <= 0) & (moved < -params.clip_low)
    inside = (~(high | low)).to(ratio.dtype)
    return TokenLoss(-advantages * ratio * batch.logprobs * inside, low, high)


@policy_loss(
    "clip_cov",
    "ppo, and 0 on a random 2e-4 of the tokens with cov(logπ, A) in (1, 5)",
    "Clip-Cov, arXiv:2505.22617",
    keys={**CLIP, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    needs=SELECTION,
)
def clip_cov(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """Leaves out tokens that would cost the most entropy.

    Deliberately other than verl: the tokens are chosen once, from the old log-probabilities of the whole
    rollout batch, instead of in each micro-batch from the current ones; so the loss does not depend on the
    split. A chosen token that the ratio clips anyway is not replaced by another.
    """
    assert batch.selected is not None, "clip_cov reads the column selected"
    token = _clipped(batch.log_ratio.exp(), batch.advantages, params)
    return token._replace(loss=token.loss * (1.0 - batch.selected))


@policy_loss(
    "kl_cov",
    "−ρA, plus c|d| on the 2e-4 of the tokens with the highest cov(logπ, A)",
    "KL-Cov, arXiv:2505.22617",
    keys={"cov_share": 2e-4, "cov_kl_coef": 1.0},
    needs=SELECTION,
)
def kl_cov(batch: PolicyBatch, params: LossParams) -> TokenLoss:
    """Holds back the tokens that would cost the most entropy; they are chosen as for ``clip_cov``."""
    assert batch.selected is not None, "kl_cov reads the column selected"
    d = batch.log_ratio
    return TokenLoss(-d.exp() * batch.advantages + params.cov_kl_coef * batch.selected * d.abs())


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> TokenLoss:
    """``0.5·max((V − R)², (clip(V, V_old ± ε) − R)²)`` per token, all ``[N]``; ``clip=None`` is plain.

    The clip keeps one batch from moving the critic far (PPO's reference code; OpenRLHF ε 0.5, TRL 0.2).
    """
    free = 0.5 * (values - returns).square()
    if clip is None:
        return TokenLoss(free)
    bounded = 0.5 * (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    acts = bounded > free
    return TokenLoss(free.maximum(bounded), acts & (values < old_values), acts & (values > old_values))
