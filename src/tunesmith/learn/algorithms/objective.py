"""The objectives of training: a policy loss with a KL and an entropy bonus, a value loss,
supervised losses.

An objective is ``(forest, predictions) -> (scalar, metrics)``, a frozen dataclass that can be sent
to other processes. The scalar is ``sum(weight · (loss · correction + β·KL − c·H))`` over the
forest's tokens. Weights are already divided by the optimizer batch's denominators, so the forests'
scalars add up. Metrics are sums with the column ``metric_weight`` and add up to means over the
optimizer batch's tokens. A share is two counts, ``name`` and ``name/of``
(``aggregation.with_shares``).

Columns read: ``weight`` and ``metric_weight`` always (``aggregation.weigh``); ``advantages``,
``old_logprobs``, ``ref_logprobs``, ``correction`` and the loss's own by the policy objective;
``returns`` and ``old_values`` by the value objective.

A token with a non-finite input has weight 0 (``Batch.finite``). All its inputs are set to zero
first, so that none reaches a gradient. A token whose new log-probability is not finite is set to
zero too, but counts in the denominator: weights are fixed before the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tunesmith.config.families import KLInLoss
from tunesmith.learn.algorithms.aggregation import OUT_OF
from tunesmith.learn.algorithms.corrections import NoCorrection, correction_weights
from tunesmith.learn.algorithms.kl import kl_loss
from tunesmith.learn.algorithms.losses import Loss, PolicyBatch, TokenLoss, value_loss
from tunesmith.learn.algorithms.outcomes import flat

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.config.algorithm import Algorithm
    from tunesmith.learn.data.batch import Batch
    from tunesmith.models.forest import Forest, Predictions

TensorMetrics = dict[str, "Tensor"]
Objective = Callable[["Forest", "Predictions"], "tuple[Tensor, TensorMetrics]"]

OWN = "loss."
"""A prefix for the names of the loss's own columns in a batch, so that none replaces a column of
the training loop."""


def prepare_columns(batch: Batch, algorithm: Algorithm, seed: int) -> None:
    """Add ``correction``, if the resolved ``algorithm`` has one, and its loss's own columns.

    They depend on whole sequences, groups or the batch, so they are computed before any split.

    Args:
        batch: a rollout batch with ``advantages``, ``old_logprobs`` and, for a correction,
            ``behaviour_logprobs``.
        seed: for a loss that draws at random.
    """
    if not isinstance(algorithm.correction, NoCorrection):
        old = batch.split(batch.columns["old_logprobs"])
        sampler = batch.split(batch.columns["behaviour_logprobs"])
        weights = map(partial(correction_weights, algorithm.correction), old, sampler)
        batch.add("correction", flat(list(weights)))
    assert isinstance(algorithm.loss, Loss)
    for name, values in algorithm.loss.columns(batch, np.random.default_rng(seed)).items():
        batch.add(OWN + name, values)


class _Tokens:
    """The predictions of a forest; 0 where the weight is 0 or a value is not finite."""

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

    def keep(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.drop, 0.0)

    def column(self, name: str) -> Tensor:
        return self.keep(self.forest.columns[name])

    def find(self, name: str) -> Tensor | None:
        return self.column(name) if name in self.forest.columns else None

    def own(self) -> dict[str, Tensor]:
        """The loss's own columns."""
        names = [name for name in self.forest.columns if name.startswith(OWN)]
        return {name.removeprefix(OWN): self.column(name) for name in names}

    def mean(self, values: Tensor) -> Tensor:
        """This forest's part of a mean over the optimizer batch's tokens."""
        return (self.metric_weight * values.detach()).sum()

    def share(self, name: str, acts: Tensor) -> TensorMetrics:
        """This forest's part of a share of the optimizer batch's tokens."""
        counted = self.forest.columns["metric_weight"] > 0
        acting = acts.detach().bool() & (self.metric_weight > 0)
        return {name: acting.sum(), name + OUT_OF: counted.sum()}

    def clip_shares(self, token: TokenLoss, prefix: str = "") -> TensorMetrics:
        metrics: TensorMetrics = {}
        for name, acts in (("clip_low", token.clipped_low), ("clip_high", token.clipped_high)):
            metrics |= self.share(prefix + name, acts) if acts is not None else {}
        return metrics


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """A policy loss, with a KL in the loss (``kl_coef``, ``kl_estimator``) and an entropy bonus."""

    loss: Loss
    kl_coef: float = 0.0
    kl_estimator: str | None = None
    entropy_coef: float = 0.0

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        logprobs = predictions.logprobs
        assert logprobs is not None, "a policy objective reads logprobs"
        tokens = _Tokens(forest, logprobs)
        weight = tokens.column("weight")
        correction = tokens.find("correction")
        reference = tokens.find("ref_logprobs")
        batch = PolicyBatch(
            logprobs=tokens.keep(logprobs),
            old_logprobs=tokens.column("old_logprobs"),
            advantages=tokens.column("advantages"),
            keep=~tokens.drop,
            sample=forest.sample,
            num_samples=forest.num_samples,
            columns=tokens.own(),
        )
        token = self.loss(batch)
        total = token.loss if correction is None else token.loss * correction
        d = batch.log_ratio.detach()
        ratio = d.exp()
        metrics = {
            "ratio": tokens.mean(ratio),
            **tokens.share("ratio_over_2", ratio > 2.0),
            "policy_kl": tokens.mean(ratio - 1.0 - d),  # the k3 estimate of KL(old ‖ new)
            **tokens.clip_shares(token),
            "policy_loss": (weight * total.detach()).sum(),
        }
        if correction is not None:
            metrics["correction"] = tokens.mean(correction)
            metrics |= tokens.share("correction_rejected", correction == 0)
        if reference is not None:
            metrics["ref_kl"] = tokens.mean(kl_loss(batch.logprobs.detach(), reference, "k3"))
        if self.kl_coef:
            assert reference is not None and self.kl_estimator, (
                "a KL in the loss needs ref_logprobs and an estimator"
            )
            total = total + self.kl_coef * kl_loss(batch.logprobs, reference, self.kl_estimator)
        # If the exact entropy is not computed: −logπ of sampled tokens, whose expectation is the
        # entropy.
        metrics["entropy"] = tokens.mean(-batch.logprobs)
        entropy = predictions.entropy
        if entropy is not None:
            entropy = entropy.masked_fill(tokens.drop | ~entropy.detach().isfinite(), 0.0)
            metrics["entropy"] = tokens.mean(entropy)
        if self.entropy_coef:
            assert entropy is not None, "an entropy bonus needs the entropy"
            total = total - self.entropy_coef * entropy
        metrics["nonfinite_tokens"] = tokens.nonfinite
        return (weight * total).sum(), metrics


def policy_objective(algorithm: Algorithm, *, kl_coef: float | None = None) -> PolicyObjective:
    """The objective of a resolved section; an adaptive controller's ``kl_coef`` replaces the
    section's."""
    kl = algorithm.kl
    loss = algorithm.loss
    assert isinstance(loss, Loss)
    bonus = algorithm.entropy_coef
    if isinstance(kl, KLInLoss):
        coef = kl.coef if kl_coef is None else kl_coef
        return PolicyObjective(loss, coef, kl.estimator, bonus)
    return PolicyObjective(loss, entropy_coef=bonus)


@dataclass(frozen=True, slots=True)
class SFTObjective:
    """``sum(weight · −logπ)``: with ``token_mean`` weights, the mean over the batch's loss
    tokens."""

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        logprobs = predictions.logprobs
        assert logprobs is not None, "supervised training reads logprobs"
        tokens = _Tokens(forest, logprobs)
        nll = -tokens.keep(logprobs)
        metrics = {"nll": tokens.mean(nll), "nonfinite_tokens": tokens.nonfinite}
        return (tokens.column("weight") * nll).sum(), metrics


@dataclass(frozen=True, slots=True)
class DistillationObjective:
    """``Σ weight · ((1 − α)·(−logπ) + α·KL(teacher ‖ student))``, Hinton et al., arXiv:1503.02531.

    With ``token_mean`` weights it is the mean over the batch's loss tokens. The papers'
    cross-entropy with the teacher is the KL plus the teacher's entropy, which has no gradient.
    Reverse KL on the student's samples is a policy
    gradient: preset ``distill``.
    """

    alpha: float

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        logprobs = predictions.logprobs
        divergence = predictions.divergence
        assert logprobs is not None and divergence is not None, "distillation needs a teacher"
        tokens = _Tokens(forest, logprobs, divergence)
        nll = -tokens.keep(logprobs)
        kl = tokens.keep(divergence)
        metrics = {
            "nll": tokens.mean(nll),
            "teacher_kl": tokens.mean(kl),
            "nonfinite_tokens": tokens.nonfinite,
        }
        loss = (1.0 - self.alpha) * nll + self.alpha * kl
        return (tokens.column("weight") * loss).sum(), metrics


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The critic's objective, on the predictions' ``values``."""

    clip: float | None
    weight_column: str = "weight"

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        assert predictions.values is not None, "a value objective reads values"
        tokens = _Tokens(forest, predictions.values)
        values = tokens.keep(predictions.values)
        returns = tokens.column("returns")
        token = value_loss(values, returns, tokens.column("old_values"), self.clip)
        metrics = {
            "value": tokens.mean(values),
            "value_loss": tokens.mean(token.loss),
            "value_error": tokens.mean((values.detach() - returns).square()),
            **tokens.clip_shares(token, "value_"),
            "nonfinite_tokens": tokens.nonfinite,
        }
        return (tokens.column(self.weight_column) * token.loss).sum(), metrics


@dataclass(frozen=True, slots=True)
class ActorCriticObjective:
    """A policy's objective plus ``coef`` times the value loss, a mean over tokens, in one backward
    pass."""

    policy: Objective
    clip: float | None
    coef: float

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        loss, metrics = self.policy(forest, predictions)
        value_loss, more = ValueObjective(self.clip, "metric_weight")(forest, predictions)
        return loss + self.coef * value_loss, more | metrics
