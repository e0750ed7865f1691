"""The KL divergence from a reference: its estimators, and a controller of its coefficient.

With ``δ = logπ − logπ_ref`` of a token that the policy sampled
(http://joschu.net/blog/kl-approx.html): ``k1 = δ``, ``k2 = δ²/2``, ``k3 = exp(−δ) − 1 + δ``. All
three estimate the same value. In a loss only the gradient
matters: that of k2 is right on policy, that of k1 is zero in expectation, and that of k3 belongs to
another divergence. ``k1+`` and ``k3+`` have the values of k1 and k3 and the gradient of k2
(straight-through).

Values are clamped to ±10. The gradient of k2 passes through the clamp, because tokens far from the
reference need it most (OpenRLHF's clamp stops it, verl does not clamp k2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tunesmith.config.families import KL, ReferenceKL
from tunesmith.learn.algorithms.losses import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

MAX_VALUE = 10.0
HORIZON = 10_000


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL per token ``[N]``, with the estimator's gradient for ``logprobs``."""
    delta = logprobs - ref_logprobs
    value: Tensor = _value(delta, estimator.removesuffix("+"), lambda x: x.exp())
    if estimator in ("k1", "k3"):
        return value.clamp(-MAX_VALUE, MAX_VALUE)
    carrier = delta.square() / 2
    return carrier - carrier.detach() + value.detach().clamp(-MAX_VALUE, MAX_VALUE)


def kl_values(
    logprobs: NDArray[np.float64], ref_logprobs: NDArray[np.float64], estimator: str
) -> NDArray[np.float64]:
    """KL per token without gradient, for a penalty in the reward."""
    return np.clip(_value(logprobs - ref_logprobs, estimator, np.exp), -MAX_VALUE, MAX_VALUE)


def _value(delta: Any, estimator: str, exp: Callable[[Any], Any]) -> Any:
    """The estimate from an array or a tensor ``delta``."""
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
class KLController:
    """The coefficient β. With a target it adapts: ``β ← β·(1 + clip(KL/target − 1, ±0.2)·min(1,
    n/horizon))``.

    Source: arXiv:1909.08593.
    """

    coef: float
    target: float | None = None
    horizon: int = HORIZON

    @classmethod
    def of(cls, kl: KL) -> Self:
        """The controller of a run's settings; its coefficient is 0 without a KL."""
        if not isinstance(kl, ReferenceKL):
            return cls(0.0)
        return cls(kl.coef, kl.target, kl.horizon or HORIZON)

    def update(self, kl: float, samples: int) -> float:
        """Adapt to the mean KL of ``samples`` rollouts; return the coefficient. A KL that is not
        finite is ignored."""
        if self.target is not None and np.isfinite(kl):
            error = float(np.clip(kl / self.target - 1.0, -0.2, 0.2))
            self.coef *= 1.0 + error * min(1.0, samples / self.horizon)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the adapted coefficient; without a target it is the settings'."""
        if self.target is not None:
            self.coef = float(state["coef"])
