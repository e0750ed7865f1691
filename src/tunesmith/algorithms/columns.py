"""Columns a loss needs that look at more than one sample: computed once per rollout batch, before any cut.

That is what keeps these losses independent of how the batch is split afterwards: correction weights of a
sequence, GEPO's expectation over a group, the tokens that covariance losses choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunesmith.algorithms.aggregation import finite_mask
from tunesmith.algorithms.corrections import correction_weights
from tunesmith.algorithms.losses import POLICY_LOSSES
from tunesmith.types import Sample

if TYPE_CHECKING:
    from tunesmith.config.schema import AlgorithmSection

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def prepare_columns(samples: Sequence[Sample], section: AlgorithmSection, seed: int) -> list[Sample]:
    """Add what the resolved ``section`` asks for: ``correction``, ``group_logprob``, ``selected``.

    The samples are a whole rollout batch with ``advantages`` and ``old_logprobs`` (and, where a correction
    is set, ``behaviour_logprobs``). ``seed`` draws Clip-Cov's tokens.
    """
    prepared = list(samples)
    assert section.loss is not None, "the section is not resolved"
    if section.correction not in (None, "none"):
        prepared = [_with_correction(s, section) for s in prepared]
    needs = POLICY_LOSSES[section.loss].needs
    if "group_logprobs" in needs:
        prepared = _with_group_logprob(prepared)
    if "selection" in needs:
        prepared = _with_selection(prepared, section, seed)
    return prepared


def _column(sample: Sample, name: str) -> Floats:
    return np.array(sample.columns[name], dtype=np.float64)


def _with(sample: Sample, name: str, mask: Mask, values: Floats | float) -> Sample:
    column = np.zeros(len(sample.token_ids))
    column[mask] = values
    return replace(sample, columns={**sample.columns, name: column.tolist()})


def _with_correction(sample: Sample, section: AlgorithmSection) -> Sample:
    name, low, high = section.correction, section.correction_low or 0.0, section.correction_high
    assert name is not None and high is not None, "the section is not resolved"
    mask = np.array(sample.loss_mask, dtype=np.bool_)
    old, sampler = (_column(sample, n)[mask] for n in ("old_logprobs", "behaviour_logprobs"))
    weights = correction_weights(name, old, sampler, low, high)
    return _with(sample, "correction", mask, weights)


def group_logprob(sequence_logprobs: Floats) -> float:
    """``log(Σq² / Σq)`` of a group's sequence probabilities ``q``, given as logs ``[n]``."""
    return float(np.logaddexp.reduce(2.0 * sequence_logprobs) - np.logaddexp.reduce(sequence_logprobs))


def _with_group_logprob(samples: Sequence[Sample]) -> list[Sample]:
    masks = [finite_mask(s) for s in samples]
    groups: dict[int, list[float]] = {}
    for sample, mask in zip(samples, masks, strict=True):
        assert sample.group >= 0, "gepo compares the samples of a group"
        logs = groups.setdefault(sample.group, [])
        if mask.any():
            logs.append(float(_column(sample, "old_logprobs")[mask].mean()))
    expected = {group: group_logprob(np.array(logs)) if logs else 0.0 for group, logs in groups.items()}
    return [_with(s, "group_logprob", m, expected[s.group]) for s, m in zip(samples, masks, strict=True)]


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


def _with_selection(samples: Sequence[Sample], section: AlgorithmSection, seed: int) -> list[Sample]:
    masks = [finite_mask(s) for s in samples]
    old, advantages = (
        np.concatenate([np.zeros(0), *(_column(s, name)[m] for s, m in zip(samples, masks, strict=True))])
        for name in ("old_logprobs", "advantages")
    )
    chosen = np.zeros(old.size)
    share, low, high = section.cov_share, section.cov_low, section.cov_high
    assert share is not None, "the section is not resolved"
    if old.size and section.loss == "clip_cov":
        assert low is not None and high is not None, "the section is not resolved"
        chosen[choose_clip_cov(covariances(old, advantages), share, low, high, np.random.default_rng(seed))] = 1.0
    elif old.size:
        chosen[choose_kl_cov(covariances(old, advantages), share)] = 1.0
    parts = np.split(chosen, np.cumsum([int(m.sum()) for m in masks])[:-1]) if samples else []
    return [_with(s, "selected", m, part) for s, m, part in zip(samples, masks, parts, strict=True)]
