"""Off-policy correction: weights for tokens sampled by a policy other than the one in training.
Plain NumPy.

The sampler's log-probabilities differ from the trainer's: other kernels, lower precision, older
weights. The difference can be handled in two ways:

- *bypass*: ``old_logprobs`` are the sampler's. The ratio and clip of the loss cover the difference.
- *decoupled* (arXiv:2110.00641): the trainer recomputes ``old_logprobs``, the loss's ratio is
  relative to them, and each token is weighted by a bounded ``w = π_old / π_sampler`` in the column
  ``correction``.

Weights have no gradient and are computed per whole sample, before the batch is split. Bounds are on
``w`` itself. A rejected token has weight 0 but counts in the denominators (unlike in verl):
rejecting more tokens makes the step smaller and does not give the rest more weight.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from tunesmith.config.families import CorrectionChoice
from tunesmith.learn.algorithms.losses import MAX_LOG_RATIO
from tunesmith.learn.algorithms.outcomes import Floats


class Correction(CorrectionChoice):
    """Weights for off-policy tokens. A subclass has fields with defaults and ``__call__``."""

    @abstractmethod
    def __call__(self, log_weights: Floats) -> Floats:
        """Weights ``[n]`` of a sample's policy tokens, from ``log w [n]``; all finite."""


class NoCorrection(Correction):
    """Every token has weight 1; no column is added."""

    name = "none"
    formula = "1"
    use = "sampler and trainer agree"

    def __call__(self, log_weights: Floats) -> Floats:
        return np.ones_like(log_weights)


High = Annotated[float, Field(gt=0)]
Low = Annotated[float, Field(ge=0)]


class _Truncated(Correction):
    high: High = 2.0
    """Upper bound C on the weight."""


class _Bounded(Correction):
    low: Low = 0.5
    """Lower bound."""
    high: High = 2.0
    """Upper bound."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} has to be below high = {self.high:g}")
        return self


def _exp(log_weights: Floats | np.float64) -> Any:
    """The weights, as an array or a number like ``log_weights``."""
    return np.exp(np.clip(log_weights, -MAX_LOG_RATIO, MAX_LOG_RATIO))


class TokenTruncate(_Truncated):
    """Truncated importance sampling, token by token."""

    name = "token_truncate"
    formula = "min(w, C)"
    source = "TIS, https://fengyao.notion.site/off-policy-rl"
    use = "sampler and trainer differ a little: another engine, quantised weights"

    def __call__(self, log_weights: Floats) -> Floats:
        return np.minimum(_exp(log_weights), self.high)


class TokenClamp(_Bounded):
    """``token_truncate`` with a lower bound."""

    name = "token_clamp"
    formula = "clip(w, low, high)"
    source = "OpenRLHF (tis)"
    use = "as token_truncate, and small weights should not vanish"

    def __call__(self, log_weights: Floats) -> Floats:
        return np.clip(_exp(log_weights), self.low, self.high)


class IcePop(_Bounded):
    """Tokens outside the bounds are rejected."""

    name = "icepop"
    formula = "w · 1[low ≤ w ≤ high]"
    source = "IcePop, Ling Team 2025"
    use = "mixtures of experts: reject the tokens on which sampler and trainer disagree"

    high: High = 5.0

    def __call__(self, log_weights: Floats) -> Floats:
        weights = _exp(log_weights)
        return weights * ((weights >= self.low) & (weights <= self.high))


class SequenceTruncate(_Truncated):
    """The weight of the whole sequence for each of its tokens."""

    name = "sequence_truncate"
    formula = "min(Πw, C) on every token"
    source = "sequence TIS, verl"
    use = "unbiased for short answers; the weight of a long one varies widely"

    def __call__(self, log_weights: Floats) -> Floats:
        return np.full_like(log_weights, np.minimum(_exp(log_weights.sum()), self.high))


class Geometric(_Bounded):
    """Keeps or rejects the whole sequence, by the geometric mean of its weights."""

    name = "geometric"
    formula = "1[low ≤ exp(mean log w) ≤ high]"
    source = "geometric rejection, verl"
    use = "only answers with nearly equal probabilities; very strict"

    unaltered_only = "keeps answers that trainer and sampler find equally likely"

    low: Low = 0.999
    high: High = 1.001

    def __call__(self, log_weights: Floats) -> Floats:
        mean = _exp(log_weights.mean())
        return np.full_like(log_weights, float(self.low <= mean <= self.high))


class SequenceMask(_Bounded):
    """``geometric`` times ``token_clamp`` with the same bounds. OpenRLHF does not clip the kept
    weights."""

    name = "sequence_mask"
    formula = "1[low ≤ exp(mean log w) ≤ high] · clip(w, low, high)"
    source = "OpenRLHF, verl"
    use = "stale samples: reject answers that the current policy would not write"

    def __call__(self, log_weights: Floats) -> Floats:
        bounds = {"low": self.low, "high": self.high}
        return Geometric(**bounds)(log_weights) * TokenClamp(**bounds)(log_weights)


def correction_weights(
    correction: CorrectionChoice, old_logprobs: Floats, sampler_logprobs: Floats
) -> Floats:
    """Weights ``[n]`` of one sample's policy tokens.

    A token with non-finite log-probabilities is left out of its sequence's statistics and gets NaN,
    which drops it from the loss (``Batch.finite``).
    """
    assert isinstance(correction, Correction)
    with np.errstate(invalid="ignore"):
        log_weights = old_logprobs - sampler_logprobs
    finite = np.isfinite(log_weights)
    weights = np.full_like(log_weights, np.nan)
    if finite.any():
        weights[finite] = correction(log_weights[finite])
    return weights
