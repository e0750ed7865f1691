"""What a backend minimises, composed from a loss, a KL and an entropy bonus.

An objective is ``(forest, predictions) -> (scalar, metrics)``. The scalar is
``sum(weight · (loss · correction + β·KL − c·H))`` over this forest's tokens with weights that are already
divided by the optimizer batch's denominators, so forests add up. Metrics are summed with the column
``share`` and add up to means over the optimizer batch's tokens.

Columns read: ``weight`` and ``share`` always (``aggregation.weigh``); ``advantages``, ``old_logprobs``,
``ref_logprobs``, ``correction``, ``group_logprob``, ``selected`` by the policy objective; ``returns`` and
``old_values`` by the value objective.

A token whose inputs are not finite has weight 0 (``finite_mask``). It is set to zero before anything is
computed, so that nothing of it reaches a gradient; so is a token whose new log-probability is not finite,
which only the numerator can leave, since weights are made before the forward. A forest without
predictions, such as a rank is given that has run out of samples, gives 0 and no metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunesmith.algorithms.kl import kl_loss
from tunesmith.algorithms.losses import POLICY_LOSSES, LossParams, PolicyBatch, TokenLoss, value_loss

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.config.schema import AlgorithmSection
    from tunesmith.data.forest import Forest, Predictions

Metrics = dict[str, "Tensor"]
Objective = Callable[["Forest", "Predictions"], "tuple[Tensor, Metrics]"]


def loss_params(section: AlgorithmSection) -> LossParams:
    """The loss's constants from a resolved section."""
    assert section.loss is not None, "the section is not resolved"
    names = POLICY_LOSSES[section.loss].keys.keys() & LossParams.__dataclass_fields__.keys()
    return LossParams(**{name: getattr(section, name) for name in names})


def needs_entropy(section: AlgorithmSection) -> bool:
    """Whether the backend has to compute the entropy of every prediction."""
    return bool(section.entropy_coef)


def needs_reference(section: AlgorithmSection) -> bool:
    """Whether samples need ``ref_logprobs``, in the loss or in the reward."""
    return bool(section.kl_coef)


def policy_objective(section: AlgorithmSection, *, kl_coef: float | None = None) -> Objective:
    """The objective of a resolved section. ``kl_coef`` replaces the section's (an adaptive controller's)."""
    assert section.loss is not None, "the section is not resolved"
    loss, params = POLICY_LOSSES[section.loss], loss_params(section)
    coef = (section.kl_coef or 0.0) if kl_coef is None else kl_coef
    beta = coef if section.kl_in == "loss" else 0.0
    bonus = section.entropy_coef or 0.0

    def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, Metrics]:
        logprobs, entropy = predictions.logprobs, predictions.entropy
        assert logprobs is not None, "a policy objective needs log-probabilities"
        if not logprobs.numel():
            return logprobs.sum(), {}
        batch, drop = _policy_batch(forest, logprobs)
        weight, share = (_column(forest, name, drop) for name in ("weight", "share"))
        token = loss.fn(batch, params)
        policy = token.loss
        if "correction" in forest.columns:
            policy = policy * _column(forest, "correction", drop)
        total = policy
        metrics = _policy_metrics(batch, token, share) | {"policy_loss": (weight * policy.detach()).sum()}
        if "ref_logprobs" in forest.columns:
            reference = _column(forest, "ref_logprobs", drop)
            metrics["ref_kl"] = (share * kl_loss(batch.logprobs.detach(), reference, "k3")).sum()
            if beta:
                assert section.kl_estimator is not None, "the section is not resolved"
                total = total + beta * kl_loss(batch.logprobs, reference, section.kl_estimator)
        assert not beta or "ref_logprobs" in forest.columns, "a KL in the loss needs ref_logprobs"
        if entropy is not None:
            entropy = entropy.masked_fill(drop | ~entropy.detach().isfinite(), 0.0)
            metrics["entropy"] = (share * entropy.detach()).sum()
        if bonus:
            assert entropy is not None, "an entropy bonus needs the entropy"
            total = total - bonus * entropy
        metrics["nonfinite_tokens"] = _num_nonfinite(forest, drop)
        return (weight * total).sum(), metrics

    return objective


def sft_objective() -> Objective:
    """``sum(weight · −logπ)``: with ``token_mean`` weights, the mean over the batch's loss tokens."""

    def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, Metrics]:
        logprobs = predictions.logprobs
        assert logprobs is not None, "supervised training needs log-probabilities"
        if not logprobs.numel():
            return logprobs.sum(), {}
        drop = _dropped(forest, logprobs)
        weight, share = (_column(forest, name, drop) for name in ("weight", "share"))
        nll = -logprobs.masked_fill(drop, 0.0)
        metrics = {"nll": (share * nll.detach()).sum(), "nonfinite_tokens": _num_nonfinite(forest, drop)}
        return (weight * nll).sum(), metrics

    return objective


def actor_critic_objective(policy: Objective, clip: float | None, coef: float) -> Objective:
    """A policy's objective and ``coef`` times the value loss, a mean over tokens: both in one backward pass."""
    value = value_objective(clip, "share")

    def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, Metrics]:
        loss, metrics = policy(forest, predictions)
        value_loss, more = value(forest, predictions)
        more.pop("nonfinite_tokens", None)
        return loss + coef * value_loss, metrics | more

    return objective


def value_objective(clip: float | None, weight_column: str = "weight") -> Objective:
    """The critic's objective, on the predictions' ``values``."""

    def objective(forest: Forest, predictions: Predictions) -> tuple[Tensor, Metrics]:
        values = predictions.values
        assert values is not None, "a critic gives values"
        if not values.numel():
            return values.sum(), {}
        drop = _dropped(forest, values)
        weight, share = (_column(forest, name, drop) for name in (weight_column, "share"))
        returns, old = (_column(forest, name, drop) for name in ("returns", "old_values"))
        values = values.masked_fill(drop, 0.0)
        token = value_loss(values, returns, old, clip)
        error = (values.detach() - returns).square()
        metrics = {
            "value": (share * values.detach()).sum(),
            "value_loss": (share * token.loss.detach()).sum(),
            "value_error": (share * error).sum(),
            **_clip_metrics(token, share, "value_"),
            "nonfinite_tokens": _num_nonfinite(forest, drop),
        }
        return (weight * token.loss).sum(), metrics

    return objective


def _dropped(forest: Forest, predicted: Tensor) -> Tensor:
    """``[N]`` bool: tokens outside the loss, by their weight or because the prediction is not finite."""
    for name in ("weight", "share"):
        assert name in forest.columns, f"no column '{name}': aggregation.weigh adds it"
    return (forest.columns["weight"] == 0) | ~predicted.detach().isfinite()


def _num_nonfinite(forest: Forest, drop: Tensor) -> Tensor:
    return (drop & (forest.columns["weight"] != 0)).sum()


def _column(forest: Forest, name: str, drop: Tensor) -> Tensor:
    return forest.columns[name].masked_fill(drop, 0.0)


def _policy_batch(forest: Forest, logprobs: Tensor) -> tuple[PolicyBatch, Tensor]:
    drop = _dropped(forest, logprobs)
    batch = PolicyBatch(
        logprobs=logprobs.masked_fill(drop, 0.0),
        old_logprobs=_column(forest, "old_logprobs", drop),
        advantages=_column(forest, "advantages", drop),
        keep=~drop,
        sample=forest.sample,
        num_samples=forest.num_samples,
        selected=_column(forest, "selected", drop) if "selected" in forest.columns else None,
        group_logprob=_column(forest, "group_logprob", drop) if "group_logprob" in forest.columns else None,
    )
    return batch, drop


def _policy_metrics(batch: PolicyBatch, token: TokenLoss, share: Tensor) -> Metrics:
    """Means over the batch's tokens. ``policy_kl`` is the k3 estimate of KL(old ‖ new): ρ − 1 − d."""
    d = batch.log_ratio.detach()
    ratio = d.exp()
    return {
        "ratio": (share * ratio).sum(),
        "ratio_over_2": (share * (ratio > 2.0)).sum(),
        "policy_kl": (share * (ratio - 1.0 - d)).sum(),
        **_clip_metrics(token, share),
    }


def _clip_metrics(token: TokenLoss, share: Tensor, prefix: str = "") -> Metrics:
    sides = {"clip_low": token.clipped_low, "clip_high": token.clipped_high}
    return {prefix + name: (share * acts).sum() for name, acts in sides.items() if acts is not None}
