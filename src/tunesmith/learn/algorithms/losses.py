"""Policy losses: one number per token, before any mean.

A loss is a class whose fields are its settings. It takes a micro-batch and returns values ``[N]``,
which the objective multiplies by the weights (``aggregation``) and sums. A sequence loss reduces
within ``sample``, which a micro-batch never splits, and gives every token its sequence's loss: with
``seq_mean_token_mean`` that is the mean over sequences.

The code only calls methods of tensors, so that settings and the reference page can import it
without torch.

A loss that reads more than ``PolicyBatch`` has computes its own columns from the whole rollout
batch, before any split (``Loss.columns``): then it does not depend on how the batch is split.

Legend: ``d = logπ − logπ_old`` (clamped to ±20), ``ρ = exp(d)``, ``A`` advantage, ``sg``
stop-gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tunesmith.config.families import LossChoice

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.learn.data.batch import Batch, Floats

MAX_LOG_RATIO = 20.0
"""The bound on ``|d|`` before the exponential, as in verl and OpenRLHF."""


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """The inputs of losses. Tokens outside ``keep`` are zero in every column and count in no
    mean."""

    logprobs: Tensor  # [N], with gradient
    old_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    keep: Tensor  # [N] bool
    sample: Tensor  # [N] int64, the sequence of a token
    num_samples: int
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """The columns that ``Loss.columns`` names, each ``[N]``."""

    @property
    def log_ratio(self) -> Tensor:
        """``d``, ``[N]``."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of ``values [N]`` over the kept tokens of each sequence, for all its tokens
        ``[N]``."""
        kept = self.keep.to(values.dtype)
        totals = values.new_zeros(self.num_samples).index_add(0, self.sample, values * kept)
        counts = values.new_zeros(self.num_samples).index_add(0, self.sample, kept)
        return (totals / counts.clamp(min=1.0))[self.sample]


class TokenLoss(NamedTuple):
    """``loss [N]`` with gradient and, for a loss with bounds, where they took effect, ``[N]``
    bool."""

    loss: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None


class Loss(LossChoice):
    """A policy loss. A subclass has fields with defaults, ``__call__`` and, if it needs them,
    ``columns``."""

    def columns(self, batch: Batch, rng: np.random.Generator) -> Mapping[str, Floats]:
        """Constants that the loss reads in ``PolicyBatch.columns``, each ``[N]``; called once per
        rollout batch.

        Args:
            batch: the whole rollout batch, with ``advantages`` and ``old_logprobs``. A token that
                is not in ``batch.finite`` counts in no mean; a value that is not finite leaves its
                token out of the loss.
            rng: for random choices; seeded by the run's seed and the step.
        """
        return {}

    @abstractmethod
    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        """The loss of every token of a micro-batch, with gradient; called once per forward pass."""


Bound = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class ClippedLoss(Loss):
    """A loss with PPO's pessimistic clip of a ratio."""

    clip_low: Bound = 0.2
    """How far below 1 the ratio may fall before it is clipped."""
    clip_high: Bound = 0.2
    """How far above 1 the ratio may rise before it is clipped."""

    def clipped(self, ratio: Tensor, advantages: Tensor) -> TokenLoss:
        """``max(−ρA, −clip(ρ, 1−ε_low, 1+ε_high)A)`` for any ratio ``[N]``."""
        free = -ratio * advantages
        bounded = -ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        acts = bounded > free
        return TokenLoss(free.maximum(bounded), acts & (ratio < 1.0), acts & (ratio > 1.0))


class PPO(ClippedLoss):
    """Clipped surrogate. Dual clip is off unless set (verl has it on with c = 3)."""

    name = "ppo"
    formula = "max(−ρA, −clip(ρ, 1−ε_low, 1+ε_high)A); with dual clip min(·, −cA) where A < 0"
    source = "PPO, arXiv:1707.06347; dual clip arXiv:1912.09729"
    use = "several optimizer steps per batch; the usual choice"

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss of tokens with a negative advantage."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        token = self.clipped(batch.log_ratio.exp(), batch.advantages)
        if self.dual_clip is None:
            return token
        bounded = token.loss.minimum(-self.dual_clip * batch.advantages)
        return token._replace(loss=bounded.where(batch.advantages < 0, token.loss))


class Reinforce(Loss):
    """The plain policy gradient. Off policy, the correction weights it like every loss."""

    name = "reinforce"
    formula = "−A logπ"
    source = "Williams 1992"
    use = "one optimizer step per batch; with a correction also off policy"

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        return TokenLoss(-batch.advantages * batch.logprobs)


class GPG(Reinforce):
    """Equals ``reinforce``; GPG differs in its advantages."""

    name = "gpg"
    source = "GPG, arXiv:2504.02546"
    use = "one optimizer step per batch"


class GSPO(ClippedLoss):
    """Every token has its sequence's loss; the ratio is the sequence's, normalised by its
    length."""

    name = "gspo"
    formula = "−min(sA, clip(s, 1−ε_low, 1+ε_high)A), s = exp(mean_t d)"
    source = "GSPO, arXiv:2507.18071"
    use = "mixtures of experts and long answers, where token ratios are noisy"

    clip_low: Bound = 3e-4
    clip_high: Bound = 4e-4

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        ratio = batch.sequence_mean(batch.log_ratio).exp()
        return self.clipped(ratio, batch.sequence_mean(batch.advantages))


class GSPOToken(ClippedLoss):
    """GSPO's ratio with an advantage per token; GSPO's gradient if all tokens have the same
    advantage."""

    name = "gspo_token"
    formula = "ppo with ρ_t = sg(s)·exp(logπ_t − sg(logπ_t))"
    source = "GSPO-token, arXiv:2507.18071"
    use = "as gspo, if advantages differ from token to token"

    clip_low: Bound = 3e-4
    clip_high: Bound = 4e-4

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        ratio = batch.sequence_mean(batch.log_ratio).exp().detach()
        carrier = (batch.logprobs - batch.logprobs.detach()).exp()
        return self.clipped(ratio * carrier, batch.advantages)


class GMPO(Loss):
    """Geometric mean of the ratios, clipped in log space on the side of the advantage.

    An off-policy correction multiplies token by token; verl takes its geometric mean.
    """

    name = "gmpo"
    formula = "−A exp(mean_t d̂), d̂ = d clipped to ±ε only where that lowers A·d"
    source = "GMPO, arXiv:2507.20673"
    use = "a few outlying tokens upset ppo"

    clip_low: Bound = 0.4
    """How far below 0 the log-ratio may fall before it is clipped."""
    clip_high: Bound = 0.4
    """How far above 0 the log-ratio may rise before it is clipped."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        advantages = batch.sequence_mean(batch.advantages)
        d = batch.log_ratio
        sign = advantages.sign()
        bounded = d.clamp(-self.clip_low, self.clip_high)
        pessimistic = sign * (sign * d).minimum(sign * bounded)
        loss = -advantages * batch.sequence_mean(pessimistic).exp()
        acts = pessimistic != d
        return TokenLoss(loss, acts & (advantages < 0), acts & (advantages > 0))


class GEPO(ClippedLoss):
    """The ratio's denominator is the sampling probability's expectation over the group, which
    rarely vanishes.

    ``p`` and ``q`` are length-normalised sequence probabilities, ``exp(mean_t logπ)``, as in the
    authors' code, computed in log space.
    """

    name = "gepo"
    formula = "ppo per sequence with ratio p / (Σq² / Σq) over the group"
    source = "GEPO, arXiv:2508.17850"
    use = "very stale samples, many machines"
    needs = frozenset({"group"})

    def columns(self, batch: Batch, rng: np.random.Generator) -> Mapping[str, Floats]:
        assert (batch.group >= 0).all(), "gepo compares the samples of a group"
        kept = batch.finite
        counts = batch.sequence_sums(kept.astype(np.float64))
        sums = batch.sequence_sums(np.where(kept, batch.columns["old_logprobs"], 0.0))
        means = sums / np.maximum(counts, 1.0)
        expected = np.zeros(batch.num_samples)
        for group in np.unique(batch.group[counts > 0]):
            members = batch.group == group
            expected[members] = group_logprob(means[members & (counts > 0)])
        return {"group_logprob": np.where(kept, expected[batch.sample], 0.0)}

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        log_ratio = batch.sequence_mean(batch.logprobs) - batch.columns["group_logprob"]
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return self.clipped(ratio, batch.sequence_mean(batch.advantages))


def group_logprob(sequence_logprobs: Floats) -> float:
    """``log(Σq² / Σq)`` of a group's sequence probabilities ``q``, from their logarithms
    ``[n]``."""
    squares = np.logaddexp.reduce(2.0 * sequence_logprobs)
    return float(squares - np.logaddexp.reduce(sequence_logprobs))


class CISPO(Loss):
    """Clips the weight and keeps every token's gradient.

    By default the weight is in [0, 5]: no lower bound, as in the paper, and ScaleRL's upper bound
    (arXiv:2510.13786). TRL's ``epsilon_high`` is the bound itself, 1 + ε_high here.
    """

    name = "cispo"
    formula = "−sg(clip(ρ, 1−ε_low, 1+ε_high)) A logπ"
    source = "CISPO, MiniMax-M1, arXiv:2506.13585"
    use = "long reasoning, where ppo would drop the rare tokens that change an answer"

    clip_low: Bound = 1.0
    """How far below 1 a token's weight may fall."""
    clip_high: Bound = 4.0
    """How far above 1 a token's weight may rise."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        ratio = batch.log_ratio.detach().exp()
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = -bounded * batch.advantages * batch.logprobs
        return TokenLoss(loss, ratio < bounded, ratio > bounded)


class SAPO(Loss):
    """A smooth gate instead of a clip; slope 1 at ρ = 1."""

    name = "sapo"
    formula = "−A (4/τ) σ(τ(ρ − 1)), τ by the sign of A"
    source = "SAPO, arXiv:2511.20347"
    use = "ppo's hard clip makes training unsteady"

    tau_positive: Positive = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_negative: Positive = 1.05
    """Temperature of the gate where the advantage is negative."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        advantages = batch.advantages
        tau = advantages.new_full(advantages.shape, self.tau_negative)
        tau = tau.masked_fill(advantages > 0, self.tau_positive)
        gate = (tau * (batch.log_ratio.exp() - 1.0)).sigmoid() * (4.0 / tau)
        return TokenLoss(-gate * advantages)


class DPPO(Loss):
    """A trust region in probability (binary total variation) instead of in the ratio."""

    name = "dppo_tv"
    formula = "−A sg(min(ρ, c)) logπ · 1[π − π_old ≤ ε_high if A > 0, ≥ −ε_low otherwise]"
    source = "DPPO, arXiv:2602.04879"
    use = "rare tokens should move far, frequent ones should not"

    clip_low: Bound = 0.15
    """How far a token's probability may fall before its gradient stops."""
    clip_high: Bound = 0.15
    """How far a token's probability may rise before its gradient stops."""
    ratio_cap: Positive = 20.0
    """Upper bound of the ratio that weights a token."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        advantages = batch.advantages
        ratio = batch.log_ratio.detach().exp().clamp(max=self.ratio_cap)
        moved = batch.logprobs.detach().exp() - batch.old_logprobs.exp()
        high = (advantages > 0) & (moved > self.clip_high)
        low = (advantages <= 0) & (moved < -self.clip_low)
        inside = (~(high | low)).to(ratio.dtype)
        return TokenLoss(-advantages * ratio * batch.logprobs * inside, low, high)


class SelectingLoss(Loss):
    """A loss that treats a few tokens differently: those with 1 in its column ``selected``."""

    cov_share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Share of the tokens that are chosen."""

    @abstractmethod
    def select(self, covariances: Floats, rng: np.random.Generator) -> NDArray[np.intp]:
        """Indices of the chosen tokens, from every token's share ``[N]`` of cov(logπ_old, A) over
        the batch."""

    def most(self, covariances: Floats) -> int:
        """How many tokens are chosen, at least one."""
        return max(int(self.cov_share * covariances.size), 1)

    def columns(self, batch: Batch, rng: np.random.Generator) -> Mapping[str, Floats]:
        places = np.flatnonzero(batch.finite)
        selected = np.zeros(batch.num_predictions)
        if places.size:
            logprobs = batch.columns["old_logprobs"][places]
            cov = covariances(logprobs, batch.columns["advantages"][places])
            selected[places[self.select(cov, rng)]] = 1.0
        return {"selected": selected}


def covariances(logprobs: Floats, advantages: Floats) -> Floats:
    """Each token's share of cov(logπ, A) over the batch, ``[n]``: ``(logπ − mean)(A − mean)``."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


class ClipCov(SelectingLoss, ClippedLoss):
    """Drops tokens that would reduce the entropy most.

    The tokens are chosen once, from the old log-probabilities of the whole rollout batch; verl
    chooses in each micro-batch from the current ones, which depends on the split. A chosen token
    that the ratio also clips is not replaced by another.
    """

    name = "clip_cov"
    formula = "ppo, and 0 on a random 2e-4 of the tokens with cov(logπ, A) in (1, 5)"
    source = "Clip-Cov, arXiv:2505.22617"
    use = "entropy falls too fast"

    cov_low: float = 1.0
    """Lower bound of the covariance of the chosen tokens."""
    cov_high: float = 5.0
    """Upper bound of the covariance of the chosen tokens."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        token = self.clipped(batch.log_ratio.exp(), batch.advantages)
        return token._replace(loss=token.loss * (1.0 - batch.columns["selected"]))

    def select(self, covariances: Floats, rng: np.random.Generator) -> NDArray[np.intp]:
        """A random choice of the tokens with a covariance between the bounds."""
        candidates = np.flatnonzero((covariances > self.cov_low) & (covariances < self.cov_high))
        return rng.permutation(candidates)[: self.most(covariances)]


class KLCov(SelectingLoss):
    """Adds a KL to the tokens that would reduce the entropy most, chosen once as for
    ``clip_cov``."""

    name = "kl_cov"
    formula = "−ρA, plus c|d| on the 2e-4 of the tokens with the highest cov(logπ, A)"
    source = "KL-Cov, arXiv:2505.22617"
    use = "entropy falls too fast; steadier than clip_cov"

    cov_kl_coef: Bound = 1.0
    """Weight of the KL on the chosen tokens."""

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        d = batch.log_ratio
        kl = self.cov_kl_coef * batch.columns["selected"] * d.abs()
        return TokenLoss(-d.exp() * batch.advantages + kl)

    def select(self, covariances: Floats, rng: np.random.Generator) -> NDArray[np.intp]:
        """The tokens with the highest covariance; ties are broken by position."""
        return np.argsort(-covariances, kind="stable")[: self.most(covariances)]


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None
) -> TokenLoss:
    """``0.5·max((V − R)², (clip(V, V_old ± ε) − R)²)`` per token, all ``[N]``; None: no clip.

    The clip limits how far one batch moves the critic (PPO's reference code; OpenRLHF ε 0.5, TRL
    0.2).
    """
    free = 0.5 * (values - returns).square()
    if clip is None:
        return TokenLoss(free)
    moved = values - old_values
    bounded = 0.5 * (old_values + moved.clamp(-clip, clip) - returns).square()
    acts = bounded > free  # rounding can make this true within the clip, too
    return TokenLoss(free.maximum(bounded), acts & (moved < -clip), acts & (moved > clip))
