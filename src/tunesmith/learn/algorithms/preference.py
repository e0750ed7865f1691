"""Losses of whole sequences: reward models, DPO and its variants, KTO, process reward models.

An objective reduces a micro-batch's predictions to one number per sequence, and two sequences to
one number per pair. A sequence has weight ``1 / B`` (``seq_mean_token_sum``) and a pair the sum of
its two weights, so the loss is a mean over the optimizer batch's pairs, sequences or steps for any
split. A pair is a group of two and must be in one micro-batch.

Columns read, all per sample: ``side`` (+1 or −1) for pairs and KTO; ``margin`` (reward models);
``reference``, the reference's ``Σ logπ`` (DPO, KTO); ``kl`` and ``class_share`` (KTO); ``label``
(process reward models).

A sequence with a non-finite value is dropped, and its pair with it: from numerator and denominator
if the value is in a column, from the numerator only if it is a prediction.

Legend: ``N`` predictions, ``S`` sequences, ``P`` pairs; ``σ`` the logistic function; ``softplus(x)
= log(1 + e^x)``, so ``−log σ(x) = softplus(−x)``; ``Δ = logπ(y) − logπ_ref(y)``.

``accuracy`` is two counts, the right ones and those that count (``aggregation.with_shares``).
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunesmith.learn.algorithms.aggregation import OUT_OF, WEIGHT
from tunesmith.learn.algorithms.objective import TensorMetrics
from tunesmith.learn.data.batch import Batch, Floats

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.models.forest import Forest, Predictions

AGGREGATION = "seq_mean_token_sum"
"""The aggregation of the samples' weights for these objectives."""
REFERENCE = "reference"
"""Column: the reference's log-probability of a whole sequence."""
ROUNDING = 1e-6
"""Relative rounding error of log-probabilities in float32: smaller differences count as zero."""


def add_reference(batch: Batch, reference: Floats) -> None:
    """Add the column ``reference [S]`` to a batch of pairs; a value that is not finite drops its
    pair."""
    lost = np.unique(batch.group[~np.isfinite(reference)])
    batch.add_per_sample(REFERENCE, np.where(np.isin(batch.group, lost), math.nan, reference))


def add_kto_columns(batch: Batch, gaps: Floats) -> None:
    """Add the columns ``kl`` and ``class_share`` of ``KTOObjective``.

    ``kl = max(0, mean of logπ − logπ_ref over the mismatched samples)`` of the whole batch, without
    gradient.

    Args:
        gaps: ``logπ − logπ_ref`` of the mismatched samples; values that are not finite are ignored.
    """
    finite = gaps[np.isfinite(gaps)]
    kl = max(0.0, float(finite.mean())) if finite.size else 0.0
    batch.add_per_sample("kl", np.full(batch.num_samples, kl))
    _, place, counts = np.unique(batch.per_sample["side"], return_inverse=True, return_counts=True)
    batch.add_per_sample("class_share", 1.0 / counts[place])


def softplus(x: Tensor) -> Tensor:
    """``log(1 + e^x)``, exact for any ``x``."""
    return x.logaddexp(x.new_zeros(()))


def sigmoid_loss(h: Tensor, label: Tensor | float = 1.0) -> Tensor:
    """``−p log σ(h) − (1 − p) log σ(−h)``: cross-entropy of ``σ(h)`` and the probability ``p``, the
    ``label``."""
    return label * softplus(-h) + (1.0 - label) * softplus(h)


def dpo_loss(difference: Tensor, kind: str, beta: float, smoothing: float = 0.0) -> Tensor:
    """The loss of a pair from ``Δ_c − Δ_r``, ``[P]``.

    ``sigmoid``: DPO (arXiv:2305.18290, eq. 7), and cDPO if labels are wrong with probability
    ``smoothing``.
    ``ipo``: ``(Δ_c − Δ_r − 1/(2β))²`` (arXiv:2310.12036, eq. 17), on sums of log-probabilities; TRL
    takes means.
    ``hinge``: ``max(0, 1 − β(Δ_c − Δ_r))``, SLiC's loss on DPO's reward (arXiv:2309.06657).
    """
    match kind:
        case "sigmoid":
            return sigmoid_loss(beta * difference, 1.0 - smoothing)
        case "ipo":
            return (difference - 1.0 / (2.0 * beta)).square()
        case "hinge":
            return (1.0 - beta * difference).clamp(min=0.0)
        case _:
            raise AssertionError(f"no loss '{kind}'")


def kto_loss(
    delta: Tensor,
    kl: Tensor | float,
    side: Tensor,
    *,
    beta: float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> Tensor:
    """``w₊ (1 − σ(β(Δ − KL)))`` where ``side`` is +1, ``w₋ (1 − σ(β(KL − Δ)))`` where it is −1
    (arXiv:2402.01306)."""
    weight = (side > 0).to(delta.dtype) * (desirable - undesirable) + undesirable
    return weight * (-beta * side * (delta - kl)).sigmoid()


@dataclass(frozen=True, slots=True)
class Sequences:
    """A micro-batch by sequence; zero outside ``keep``."""

    forest: Forest
    score: Tensor  # [S], with gradient: Σ of the predictions
    length: Tensor  # [S]
    weight: Tensor  # [S]
    counted: Tensor  # [], sequences that count in shares, also those whose prediction is not finite
    keep: Tensor  # [S] bool

    @classmethod
    def of(cls, forest: Forest, predicted: Tensor | None) -> Sequences:
        """``predicted [N]``: log-probabilities, or values."""
        assert predicted is not None, "the model does not predict what the objective reads"
        zeros = predicted.new_zeros(forest.num_samples)
        usable = predicted.detach().isfinite() & (forest.columns[WEIGHT] != 0)
        lost = zeros.index_add(0, forest.sample, (~usable).to(zeros.dtype))
        keep = lost == 0
        score = zeros.index_add(0, forest.sample, predicted.masked_fill(~usable, 0.0))
        length = zeros.index_add(0, forest.sample, usable.to(zeros.dtype))
        weight = zeros.scatter(0, forest.sample, forest.columns[WEIGHT].to(zeros.dtype))
        kept = weight.masked_fill(~keep, 0.0)
        return cls(forest, score.masked_fill(~keep, 0.0), length, kept, (weight > 0).sum(), keep)

    def column(self, name: str) -> Tensor:
        """``[S]``."""
        return self.forest.per_sample[name].to(self.weight.dtype).masked_fill(~self.keep, 0.0)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a micro-batch; ``weight`` is zero for a dropped pair."""

    place: Tensor  # [S] int64, the pair of each sequence
    side: Tensor  # [S], +1 or −1
    weight: Tensor  # [P]
    keep: Tensor  # [P] bool

    @classmethod
    def of(cls, sequences: Sequences) -> Pairs:
        import torch

        # Not ``column``, which is zero for dropped sequences.
        side = sequences.forest.per_sample["side"].to(sequences.weight.dtype)
        group = sequences.forest.group
        split = "a pair was split: the learner must keep groups together"
        assert len(group) % 2 == 0, split
        # Sorting makes the two of a pair neighbours. ``unique`` or an assertion would wait for the
        # device.
        place = torch.empty_like(group)
        order = group.argsort()
        place[order] = torch.arange(len(group), device=group.device) // 2
        none = side.new_zeros(len(group) // 2)
        two = group[order].view(-1, 2)
        together = (none.index_add(0, place, side) == 0) & (two[:, 0] == two[:, 1])
        torch._assert_async(together.all(), split)
        keep = none.index_add(0, place, (~sequences.keep).to(side.dtype)) == 0
        weight = none.index_add(0, place, sequences.weight).masked_fill(~keep, 0.0)
        return cls(place, side, weight, keep)

    def difference(self, values: Tensor) -> Tensor:
        """``values [S]`` of the +1 sequence minus the −1 sequence, ``[P]``; zero for a dropped
        pair."""
        return self.both(values * self.side)

    def first(self, values: Tensor) -> Tensor:
        """``values [S]`` of the +1 sequence, ``[P]``."""
        return self.both(values * (self.side > 0))

    def both(self, values: Tensor) -> Tensor:
        """The sum of ``values [S]`` over both sequences, ``[P]``; zero for a dropped pair."""
        sums = values.new_zeros(self.keep.shape).index_add(0, self.place, values)
        return sums.masked_fill(~self.keep, 0.0)


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """A reward model's loss on ``values``: ``−log σ(r_c − r_r − m)``, Bradley and Terry with Llama
    2's margin (arXiv:2307.09288, eq. 2); m = 0 without ``margins``."""

    margins: bool = True

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        sequences = Sequences.of(forest, predictions.values)
        pairs = Pairs.of(sequences)
        margin = pairs.first(sequences.column("margin")) if self.margins else 0.0
        loss = sigmoid_loss(pairs.difference(sequences.score) - margin)
        rewards = sequences.score.detach()
        metrics = _pair_metrics(sequences, pairs, rewards, rewards)
        for name, values in (("rewards/mean", rewards), ("rewards/square", rewards.square())):
            metrics[name] = (pairs.weight * pairs.both(values) / 2.0).sum()
        return (pairs.weight * loss).sum(), metrics


@dataclass(frozen=True, slots=True)
class DPOObjective:
    """DPO on ``logprobs``: ``dpo_loss`` plus ``λ · (−logπ(y_c)) / |y_c|`` (arXiv:2404.19733)."""

    loss: str
    beta: float
    smoothing: float = 0.0
    nll_coef: float = 0.0

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        beta = self.beta
        sequences = Sequences.of(forest, predictions.logprobs)
        pairs = Pairs.of(sequences)
        delta = sequences.score - sequences.column(REFERENCE)
        loss = dpo_loss(pairs.difference(delta), self.loss, beta, self.smoothing)
        terms = beta * sequences.score.detach()
        metrics = _pair_metrics(sequences, pairs, beta * delta.detach(), terms)
        if self.nll_coef:
            nll = -pairs.first(sequences.score / sequences.length.clamp(min=1.0))
            loss = loss + self.nll_coef * nll
            metrics["nll"] = (pairs.weight * nll.detach()).sum()
        return (pairs.weight * loss).sum(), metrics


@dataclass(frozen=True, slots=True)
class KTOObjective:
    """KTO on ``logprobs``. ``class_share`` is 1 / (the number of the batch's sequences with the
    same side).

    The metrics ``rewards/chosen/seen`` and ``rewards/rejected/seen`` are 0 for a batch without such
    answers.
    """

    beta: float
    desirable: float = 1.0
    undesirable: float = 1.0

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        sequences = Sequences.of(forest, predictions.logprobs)
        side = sequences.column("side")
        kl = sequences.column("kl")
        share = sequences.column("class_share")
        delta = sequences.score - sequences.column(REFERENCE)
        loss = kto_loss(
            delta, kl, side, beta=self.beta, desirable=self.desirable, undesirable=self.undesirable
        )
        right = _right(side * (delta - kl).detach(), sequences.score.detach().abs())
        reward = self.beta * delta.detach()
        metrics = {
            "accuracy": (right * (sequences.weight > 0)).sum(),
            "accuracy" + OUT_OF: sequences.counted,
            "kl": (sequences.weight * kl).sum(),
            "nonfinite_sequences": (~sequences.keep).sum(),
        }
        for name, sign in (("rewards/chosen", 1), ("rewards/rejected", -1)):
            metrics[name] = (share * reward * (side == sign)).sum()
            metrics[f"{name}/seen"] = (share * (side == sign)).sum()
        return (sequences.weight * loss).sum(), metrics


@dataclass(frozen=True, slots=True)
class StepObjective:
    """A process reward model's loss, on the ``logprobs`` of the two label tokens after each step.

    Their difference is the logit of "good" in a softmax over these two tokens alone.
    """

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        sequences = Sequences.of(forest, predictions.logprobs)
        pairs = Pairs.of(sequences)
        logit = pairs.difference(sequences.score)
        label = pairs.first(sequences.column("label"))
        right = _right(logit.detach() * (label - 0.5).sign())
        metrics = {**_accuracy(sequences, pairs, right), "nonfinite_steps": (~pairs.keep).sum()}
        return (pairs.weight * sigmoid_loss(logit, label)).sum(), metrics


def _pair_metrics(
    sequences: Sequences, pairs: Pairs, rewards: Tensor, terms: Tensor
) -> TensorMetrics:
    """Means over the batch's pairs of the rewards ``[S]``, their difference, and the accuracy.

    ``terms [S]`` are the values that the rewards were computed from: their rounding error decides
    which pairs tie.
    """
    first = pairs.first(rewards)
    margin = pairs.difference(rewards)
    return {
        "rewards/chosen": (pairs.weight * first).sum(),
        "rewards/rejected": (pairs.weight * (first - margin)).sum(),
        "margin": (pairs.weight * margin).sum(),
        **_accuracy(sequences, pairs, _right(margin, pairs.both(terms.abs()))),
        "nonfinite_pairs": (~pairs.keep).sum(),
    }


def _accuracy(sequences: Sequences, pairs: Pairs, right: Tensor) -> TensorMetrics:
    return {
        "accuracy": (right * (pairs.weight > 0)).sum(),
        "accuracy" + OUT_OF: sequences.counted / 2,
    }


def _right(gain: Tensor, scale: Tensor | float = 0.0) -> Tensor:
    """1 above zero, 0 below, ½ for a tie, so that an untrained model has an accuracy of ½.

    Before the first step policy and reference differ by rounding only, which counts as a tie.
    """
    return (gain.sign() * (gain.abs() > ROUNDING * scale) + 1.0) / 2.0
