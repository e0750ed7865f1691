"""Estimators of the KL divergence from a reference, and a controller of its coefficient.

With ``δ = logπ − logπ_ref`` of a token the policy sampled (http://joschu.net/blog/kl-approx.html):
``k1 = δ``, ``k2 = δ²/2``, ``k3 = exp(−δ) − 1 + δ``. All three estimate the same value. As a loss only the
gradient counts: that of k2 is right on policy, that of k1 is zero in expectation and that of k3 is another
divergence's. ``k1+`` and ``k3+`` have the value of k1 and k3 with the gradient of k2 (straight-through).

Values are clamped to ±10. The gradient of k2 passes through the clamp: a token far from the reference is
the last one to stop pulling back (OpenRLHF's clamp stops it, verl does not clamp k2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.algorithms.losses import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

MAX_VALUE = 10.0

KL_IN_LOSS = ("k2", "k3", "k1+", "k3+")
"""k1 is refused here: its expected gradient on policy is zero."""
KL_IN_REWARD = ("k1", "k2", "k3")
"""A penalty in the reward has no gradient, so there is nothing for the straight-through forms to do."""


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL per token ``[N]``, with the gradient with respect to ``logprobs`` that its name says."""
    delta = logprobs - ref_logprobs
    value: Tensor = _value(delta, estimator.removesuffix("+"), lambda x: x.exp())
    if estimator in ("k1", "k3"):
        return value.clamp(-MAX_VALUE, MAX_VALUE)
    carrier = delta.square() / 2
    return carrier - carrier.detach() + value.detach().clamp(-MAX_VALUE, MAX_VALUE)


def kl_values(logprobs: NDArray[np.float64], ref_logprobs: NDArray[np.float64], estimator: str) -> NDArray[np.float64]:
    """KL per token without gradient, in NumPy: what is subtracted from rewards, ``−β·kl``."""
    return np.clip(_value(logprobs - ref_logprobs, estimator, np.exp), -MAX_VALUE, MAX_VALUE)


def _value(delta: Any, estimator: str, exp: Callable[[Any], Any]) -> Any:
    """Of an array or a tensor."""
    match estimator:
        case "k1":
            return delta
        case "k2":
            return delta * delta / 2
        case "k3":
            return exp((-delta).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1 + delta
        case _:
            raise AssertionError(f"no KL estimator '{estimator}'")


@dataclass(slots=True)
class AdaptiveKLController:
    """Keeps the KL near a target: ``β ← β·(1 + clip(KL/target − 1, ±0.2)·min(1, n/horizon))`` (arXiv:1909.08593)."""

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, samples: int) -> float:
        """Take in the mean KL of ``samples`` rollouts; return the new coefficient.

        A KL that is not finite changes nothing.
        """
        if np.isfinite(kl):
            error = float(np.clip(kl / self.target - 1.0, -0.2, 0.2))
            self.coef *= 1.0 + error * min(1.0, samples / self.horizon)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])
