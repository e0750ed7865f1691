"""Columns a loss needs that look at more than one sample: computed once per rollout batch, before any cut.

That is what keeps these losses independent of how the batch is split afterwards: correction weights of a
sequence, GEPO's expectation over a group, the tokens that covariance losses choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunesmith.algorithms.corrections import correction_weights
from tunesmith.algorithms.losses import POLICY_LOSSES
from tunesmith.data.batch import Batch, Floats

if TYPE_CHECKING:
    from tunesmith.config.schema import AlgorithmSection


def prepare_columns(batch: Batch, section: AlgorithmSection, seed: int) -> None:
    """Add what the resolved ``section`` asks for: ``correction``, ``group_logprob``, ``selected``.

    The batch is a whole rollout batch with ``advantages`` and ``old_logprobs`` (and, where a correction is set,
    ``behaviour_logprobs``). ``seed`` draws Clip-Cov's tokens.
    """
    assert section.loss is not None, "the section is not resolved"
    if section.correction not in (None, "none"):
        batch.add("correction", _correction(batch, section))
    needs = POLICY_LOSSES[section.loss].needs
    if "group_logprobs" in needs:
        batch.add("group_logprob", _group_logprobs(batch))
    if "selection" in needs:
        batch.add("selected", _selection(batch, section, seed))


def _correction(batch: Batch, section: AlgorithmSection) -> Floats:
    name, low, high = section.correction, section.correction_low or 0.0, section.correction_high
    assert name is not None and high is not None, "the section is not resolved"
    old, sampler = (batch.split(batch.columns[n]) for n in ("old_logprobs", "behaviour_logprobs"))
    weights = [correction_weights(name, *pair, low, high) for pair in zip(old, sampler, strict=True)]
    return np.concatenate([np.zeros(0), *weights])


def group_logprob(sequence_logprobs: Floats) -> float:
    """``log(Σq² / Σq)`` of a group's sequence probabilities ``q``, given as logs ``[n]``."""
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


def choose_clip_cov(cov: Floats, share: float, low: float, high: float, rng: np.random.Generator) -> NDArray[np.intp]:
    """A random ``share`` of all tokens (at least one) among those with ``low < cov < high``."""
    candidates = np.flatnonzero((cov > low) & (cov < high))
    return rng.permutation(candidates)[: max(int(share * cov.size), 1)]


def choose_kl_cov(cov: Floats, share: float) -> NDArray[np.intp]:
    """The ``share`` of all tokens (at least one) with the highest covariance; ties by place."""
    return np.argsort(-cov, kind="stable")[: max(int(share * cov.size), 1)]


def _selection(batch: Batch, section: AlgorithmSection, seed: int) -> Floats:
    places = np.flatnonzero(batch.finite)
    selected = np.zeros(batch.num_predictions)
    if not places.size:
        return selected
    cov = covariances(batch.columns["old_logprobs"][places], batch.columns["advantages"][places])
    share, low, high = section.cov_share, section.cov_low, section.cov_high
    assert share is not None, "the section is not resolved"
    if section.loss == "clip_cov":
        assert low is not None and high is not None, "the section is not resolved"
        chosen = choose_clip_cov(cov, share, low, high, np.random.default_rng(seed))
    else:
        chosen = choose_kl_cov(cov, share)
    selected[places[chosen]] = 1.0
    return selected
