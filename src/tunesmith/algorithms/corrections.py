"""Correction for sampling with another policy than the one whose gradient is taken. Plain NumPy.

The sampler's log-probabilities differ from the trainer's: other kernels, lower precision, older weights.
Two ways to deal with that differ only in which log-probabilities stand in the columns:

- *bypass*: ``old_logprobs`` are the sampler's. The loss's own ratio and clip cover the difference.
- *decoupled* (arXiv:2110.00641): the trainer recomputes ``old_logprobs``; the loss's ratio is against those,
  and each token is weighted by a bounded ``w = π_old / π_sampler`` in the column ``correction``.

Weights carry no gradient and are computed per whole sample before micro-batches are cut. Bounds are on ``w``
itself. A rejected token weighs 0 but stays in the denominators (verl takes it out of them), so that
rejecting more makes the step smaller instead of the rest louder.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tunesmith.algorithms.advantages import Floats
from tunesmith.algorithms.losses import MAX_LOG_RATIO
from tunesmith.algorithms.registry import Registry

CorrectionFn = Callable[[Floats, float, float], Floats]
"""``(log w [n], low, high) -> weights [n]`` of the policy tokens of one sample, all finite."""


CORRECTIONS: Registry[CorrectionFn] = Registry()
_register = CORRECTIONS.register


def _exp(log_weights: Floats) -> Floats:
    return np.exp(np.clip(log_weights, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _inside(value: Floats, low: float, high: float) -> Floats:
    return ((value >= low) & (value <= high)).astype(np.float64)


def _everywhere(value: np.float64, log_weights: Floats) -> Floats:
    return np.full_like(log_weights, value)


_UPPER = {"correction_high": 2.0}
_BOUNDS = {"correction_low": 0.5, **_UPPER}


@_register("token_truncate", "min(w, C)", "TIS, https://fengyao.notion.site/off-policy-rl", keys=_UPPER)
def token_truncate(log_weights: Floats, low: float, high: float) -> Floats:  # noqa: ARG001
    return np.minimum(_exp(log_weights), high)


@_register("token_clamp", "clip(w, low, high)", "OpenRLHF (tis)", keys=_BOUNDS)
def token_clamp(log_weights: Floats, low: float, high: float) -> Floats:
    return np.clip(_exp(log_weights), low, high)


@_register("icepop", "w · 1[low ≤ w ≤ high]", "IcePop, Ling Team 2025", keys={**_BOUNDS, "correction_high": 5.0})
def icepop(log_weights: Floats, low: float, high: float) -> Floats:
    weights = _exp(log_weights)
    return weights * _inside(weights, low, high)


@_register("sequence_truncate", "min(Πw, C) on every token", "sequence TIS, verl", keys=_UPPER)
def sequence_truncate(log_weights: Floats, low: float, high: float) -> Floats:  # noqa: ARG001
    return _everywhere(np.minimum(_exp(log_weights.sum(keepdims=True)), high)[0], log_weights)


@_register("sequence_mask", "1[low ≤ exp(mean log w) ≤ high] · clip(w, low, high)", "OpenRLHF, verl", keys=_BOUNDS)
def sequence_mask(log_weights: Floats, low: float, high: float) -> Floats:
    """The whole sequence or nothing of it, by its mean. OpenRLHF does not clip what it keeps."""
    return geometric(log_weights, low, high) * token_clamp(log_weights, low, high)


@_register(
    "geometric",
    "1[low ≤ exp(mean log w) ≤ high]",
    "geometric rejection, verl",
    keys={"correction_low": 0.999, "correction_high": 1.001},
)
def geometric(log_weights: Floats, low: float, high: float) -> Floats:
    return _everywhere(_inside(_exp(log_weights.mean(keepdims=True)), low, high)[0], log_weights)


def correction_weights(name: str, old_logprobs: Floats, sampler_logprobs: Floats, low: float, high: float) -> Floats:
    """Weights ``[n]`` of one sample's policy tokens.

    A token whose log-probabilities are not finite gets NaN, which takes it out of the loss
    (``aggregation.finite_mask``), and has no part in the statistics of its sequence.
    """
    with np.errstate(invalid="ignore"):
        log_weights = old_logprobs - sampler_logprobs
    finite = np.isfinite(log_weights)
    weights = np.full_like(log_weights, np.nan)
    if finite.any():
        weights[finite] = CORRECTIONS[name].fn(log_weights[finite], low, high)
    return weights
