"""What a student learns from a teacher, given how far it is from it (``Predictions.divergence``).

The third way, reverse KL on the student's own samples, is a policy gradient and needs no objective of its own: preset
``distill``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunesmith.algorithms.objective import Metrics, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.data.forest import Forest, Predictions


def distillation_objective(alpha: float) -> Objective:
    """``Σ weight · ((1 − α)·(−logπ) + α·KL(teacher ‖ student))``, Hinton et al., arXiv:1503.02531.

    With ``token_mean`` weights it is the mean over the batch's loss tokens. The cross-entropy with the teacher, which
    the papers write, is the KL plus the teacher's entropy, which has no gradient.
    """

    def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, Metrics]:
        logprobs, divergence = predictions.logprobs, predictions.divergence
        assert logprobs is not None and divergence is not None, "distillation needs a teacher"
        if not logprobs.numel():
            return logprobs.sum(), {}
        finite = logprobs.detach().isfinite() & divergence.detach().isfinite()
        drop = (forest.columns["weight"] == 0) | ~finite
        weight, share = (forest.columns[name].masked_fill(drop, 0.0) for name in ("weight", "share"))
        nll, kl = -logprobs.masked_fill(drop, 0.0), divergence.masked_fill(drop, 0.0)
        metrics = {
            "nll": (share * nll.detach()).sum(),
            "teacher_kl": (share * kl.detach()).sum(),
            "nonfinite_tokens": (drop & (forest.columns["weight"] != 0)).sum(),
        }
        return (weight * ((1.0 - alpha) * nll + alpha * kl)).sum(), metrics

    return objective
