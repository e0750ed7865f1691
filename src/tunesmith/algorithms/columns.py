"""Columns of a rollout batch that depend on whole sequences, groups or the batch, computed before any split.

These are correction weights, GEPO's expectation over a group, and the tokens that covariance losses choose. With them,
the losses do not depend on how the batch is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunesmith.algorithms.corrections import NoCorrection, correction_weights
from tunesmith.algorithms.losses import SelectingLoss
from tunesmith.data.batch import Batch, Floats

if TYPE_CHECKING:
    from tunesmith.config.algorithm import AlgorithmSection


def prepare_columns(batch: Batch, algorithm: AlgorithmSection, seed: int) -> None:
    """Add the columns ``correction``, ``group_logprob`` and ``selected`` if the resolved ``algorithm`` needs them.

    Args:
        batch: a rollout batch with ``advantages``, ``old_logprobs`` and, for a correction, ``behaviour_logprobs``.
        seed: for drawing the tokens of Clip-Cov.
    """
    loss = algorithm.loss
    if not isinstance(algorithm.correction, NoCorrection):
        old, sampler = (batch.split(batch.columns[name]) for name in ("old_logprobs", "behaviour_logprobs"))
        weights = [correction_weights(algorithm.correction, *pair) for pair in zip(old, sampler, strict=True)]
        batch.add("correction", np.concatenate([np.zeros(0), *weights]))
    if "group_logprobs" in loss.needs:
        batch.add("group_logprob", _group_logprobs(batch))
    if isinstance(loss, SelectingLoss):
        batch.add("selected", _selection(batch, loss, seed))


def group_logprob(sequence_logprobs: Floats) -> float:
    """``log(Σq² / Σq)`` of a group's sequence probabilities ``q``, from their logarithms ``[n]``."""
    return float(np.logaddexp.reduce(2.0 * sequence_logprobs) - np.logaddexp.reduce(sequence_logprobs))


def _group_logprobs(batch: Batch) -> Floats:
    assert (batch.group >= 0).all(), "gepo compares the samples of a group"
    kept = batch.finite
    counts = batch.sequence_sums(kept.astype(np.float64))
    means = batch.sequence_sums(np.where(kept, batch.columns["old_logprobs"], 0.0)) / np.maximum(counts, 1.0)
    expected = np.zeros(batch.num_samples)
    for group in np.unique(batch.group[counts > 0]):
        members = batch.group == group
        expected[members] = group_logprob(means[members & (counts > 0)])
    return np.where(kept, expected[batch.sample], 0.0)


def covariances(logprobs: Floats, advantages: Floats) -> Floats:
    """Each token's share of cov(logπ, A) over the batch, ``[n]``: ``(logπ − mean)(A − mean)``."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def _selection(batch: Batch, loss: SelectingLoss, seed: int) -> Floats:
    places = np.flatnonzero(batch.finite)
    selected = np.zeros(batch.num_predictions)
    if places.size:
        cov = covariances(batch.columns["old_logprobs"][places], batch.columns["advantages"][places])
        selected[places[loss.select(cov, np.random.default_rng(seed))]] = 1.0
    return selected
