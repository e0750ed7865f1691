"""What a backend minimises, composed from a loss, a KL and an entropy bonus.

An objective is ``(forest, predictions) -> (scalar, metrics)``. The scalar is
``sum(weight · (loss · correction + β·KL − c·H))`` over this forest's tokens with weights that are already
divided by the optimizer batch's denominators, so forests add up. Metrics are summed with the column
``metric_weight`` and add up to means over the optimizer batch's tokens.

Columns read: ``weight`` and ``metric_weight`` always (``aggregation.weigh``); ``advantages``, ``old_logprobs``,
``ref_logprobs``, ``correction``, ``group_logprob``, ``selected`` by the policy objective; ``returns`` and
``old_values`` by the value objective.

A token whose inputs are not finite has weight 0 (``finite_mask``). It is set to zero before anything is
computed, so that nothing of it reaches a gradient. A token whose new log-probability turns out not to be
finite is set to zero as well; it stays in the denominator, because weights are fixed before the forward pass.
A forest without predictions, such as a rank is given that has run out of samples, gives 0 and no metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tunesmith.algorithms.kl import kl_loss
from tunesmith.algorithms.losses import POLICY_LOSSES, LossParams, PolicyBatch, TokenLoss, value_loss

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.config.schema import AlgorithmSection
    from tunesmith.data.forest import Forest, Predictions

TensorMetrics = dict[str, "Tensor"]
Objective = Callable[["Forest", "Predictions"], "tuple[Tensor, TensorMetrics]"]
Computation = Callable[["Forest", "Tensor", "Predictions"], "tuple[Tensor, TensorMetrics]"]


def reads(kind: Literal["logprobs", "values"]) -> Callable[[Computation], Objective]:
    """Make an objective of one kind of predictions; it gives 0 and no metrics for a forest without any."""

    def wrap(compute: Computation) -> Objective:
        def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
            predicted = getattr(predictions, kind)
            assert predicted is not None, f"the objective reads {kind}, and the model gives none"
            return compute(forest, predicted, predictions) if predicted.numel() else (predicted.sum(), {})

        return objective

    return wrap


class _Tokens:
    """The predictions of a forest. Those outside the loss, by their weight or because they are not finite, are 0."""

    def __init__(self, forest: Forest, *predicted: Tensor) -> None:
        for name in ("weight", "metric_weight"):
            assert name in forest.columns, f"no column '{name}': aggregation.weigh adds it"
        self.forest = forest
        unweighted = forest.columns["weight"] == 0
        self.drop = unweighted
        for values in predicted:
            self.drop = self.drop | ~values.detach().isfinite()
        self.nonfinite = (self.drop & ~unweighted).sum()
        self.metric_weight = self.column("metric_weight")

    def kept(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.drop, 0.0)

    def column(self, name: str) -> Tensor:
        return self.kept(self.forest.columns[name])

    def find(self, name: str) -> Tensor | None:
        return self.column(name) if name in self.forest.columns else None

    def mean(self, values: Tensor) -> Tensor:
        """A metric: the mean over the optimizer batch's tokens, this forest's part of it."""
        return (self.metric_weight * values.detach()).sum()

    def clipped(self, token: TokenLoss, prefix: str = "") -> TensorMetrics:
        sides = {"clip_low": token.clipped_low, "clip_high": token.clipped_high}
        return {prefix + name: self.mean(acts) for name, acts in sides.items() if acts is not None}


def needs_entropy(section: AlgorithmSection) -> bool:
    """Whether the backend has to compute the entropy of every prediction."""
    return bool(section.entropy_coef)


def needs_reference(section: AlgorithmSection) -> bool:
    """Whether samples need ``ref_logprobs``, in the loss or in the reward."""
    return bool(section.kl_coef)


def policy_objective(section: AlgorithmSection, *, kl_coef: float | None = None) -> Objective:
    """The objective of a resolved section. ``kl_coef`` replaces the section's (an adaptive controller's)."""
    assert section.loss is not None, "the section is not resolved"
    loss = POLICY_LOSSES[section.loss]
    names = loss.settings.keys() & LossParams.__dataclass_fields__.keys()
    params = LossParams(**{name: getattr(section, name) for name in names})
    coef = (section.kl_coef or 0.0) if kl_coef is None else kl_coef
    beta = coef if section.kl_in == "loss" else 0.0
    bonus = section.entropy_coef or 0.0

    @reads("logprobs")
    def objective(forest: Forest, logprobs: Tensor, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        tokens = _Tokens(forest, logprobs)
        weight = tokens.column("weight")
        correction, reference = (tokens.find(name) for name in ("correction", "ref_logprobs"))
        batch = PolicyBatch(
            logprobs=tokens.kept(logprobs),
            old_logprobs=tokens.column("old_logprobs"),
            advantages=tokens.column("advantages"),
            keep=~tokens.drop,
            sample=forest.sample,
            num_samples=forest.num_samples,
            selected=tokens.find("selected"),
            group_logprob=tokens.find("group_logprob"),
        )
        token = loss.fn(batch, params)
        total = token.loss if correction is None else token.loss * correction
        metrics = _policy_metrics(batch, token, tokens) | {"policy_loss": (weight * total.detach()).sum()}
        if reference is not None:
            metrics["ref_kl"] = tokens.mean(kl_loss(batch.logprobs.detach(), reference, "k3"))
        if beta:
            assert reference is not None, "a KL in the loss needs ref_logprobs"
            assert section.kl_estimator is not None, "the section is not resolved"
            total = total + beta * kl_loss(batch.logprobs, reference, section.kl_estimator)
        # Without the distribution at hand, −logπ of the policy's own tokens: its mean over samples is the entropy.
        metrics["entropy"] = tokens.mean(-batch.logprobs)
        if (entropy := predictions.entropy) is not None:
            entropy = entropy.masked_fill(tokens.drop | ~entropy.detach().isfinite(), 0.0)
            metrics["entropy"] = tokens.mean(entropy)
        if bonus:
            assert entropy is not None, "an entropy bonus needs the entropy"
            total = total - bonus * entropy
        metrics["nonfinite_tokens"] = tokens.nonfinite
        return (weight * total).sum(), metrics

    return objective


def _policy_metrics(batch: PolicyBatch, token: TokenLoss, tokens: _Tokens) -> TensorMetrics:
    """``policy_kl`` is the k3 estimate of KL(old ‖ new): ρ − 1 − d."""
    d = batch.log_ratio.detach()
    ratio = d.exp()
    return {
        "ratio": tokens.mean(ratio),
        "ratio_over_2": tokens.mean(ratio > 2.0),
        "policy_kl": tokens.mean(ratio - 1.0 - d),
        **tokens.clipped(token),
    }


def sft_objective() -> Objective:
    """``sum(weight · −logπ)``: with ``token_mean`` weights, the mean over the batch's loss tokens."""

    @reads("logprobs")
    def objective(forest: Forest, logprobs: Tensor, _: Predictions) -> tuple[Tensor, TensorMetrics]:
        tokens = _Tokens(forest, logprobs)
        nll = -tokens.kept(logprobs)
        return (tokens.column("weight") * nll).sum(), {"nll": tokens.mean(nll), "nonfinite_tokens": tokens.nonfinite}

    return objective


def distillation_objective(alpha: float) -> Objective:
    """``Σ weight · ((1 − α)·(−logπ) + α·KL(teacher ‖ student))``, Hinton et al., arXiv:1503.02531.

    With ``token_mean`` weights it is the mean over the batch's loss tokens. The cross-entropy with the teacher, which
    the papers write, is the KL plus the teacher's entropy, which has no gradient. Reverse KL on the student's own
    samples is a policy gradient: preset ``distill``.
    """

    @reads("logprobs")
    def objective(forest: Forest, logprobs: Tensor, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        divergence = predictions.divergence
        assert divergence is not None, "distillation needs a teacher"
        tokens = _Tokens(forest, logprobs, divergence)
        nll, kl = -tokens.kept(logprobs), tokens.kept(divergence)
        metrics = {"nll": tokens.mean(nll), "teacher_kl": tokens.mean(kl), "nonfinite_tokens": tokens.nonfinite}
        return (tokens.column("weight") * ((1.0 - alpha) * nll + alpha * kl)).sum(), metrics

    return objective


def actor_critic_objective(policy: Objective, clip: float | None, coef: float) -> Objective:
    """A policy's objective and ``coef`` times the value loss, a mean over tokens: both in one backward pass."""
    value = value_objective(clip, "metric_weight")

    def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        loss, metrics = policy(forest, predictions)
        value_loss, more = value(forest, predictions)
        more.pop("nonfinite_tokens", None)
        return loss + coef * value_loss, metrics | more

    return objective


def value_objective(clip: float | None, weight_column: str = "weight") -> Objective:
    """The critic's objective, on the predictions' ``values``."""

    @reads("values")
    def objective(forest: Forest, values: Tensor, _: Predictions) -> tuple[Tensor, TensorMetrics]:
        tokens = _Tokens(forest, values)
        values, returns = tokens.kept(values), tokens.column("returns")
        token = value_loss(values, returns, tokens.column("old_values"), clip)
        metrics = {
            "value": tokens.mean(values),
            "value_loss": tokens.mean(token.loss),
            "value_error": tokens.mean((values.detach() - returns).square()),
            **tokens.clipped(token, "value_"),
            "nonfinite_tokens": tokens.nonfinite,
        }
        return (tokens.column(weight_column) * token.loss).sum(), metrics

    return objective
