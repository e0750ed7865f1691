"""Columns of a rollout batch that depend on whole sequences, groups or the batch, computed before any split.

These are correction weights and the columns that a loss computes for itself. With them, the losses do not depend on how
the batch is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunesmith.algorithms.corrections import NoCorrection, correction_weights

if TYPE_CHECKING:
    from tunesmith.config.algorithm import AlgorithmSection
    from tunesmith.data.batch import Batch

OWN = "loss."
"""Before the names of the loss's own columns in a batch, so that none replaces a column of the training loop."""


def prepare_columns(batch: Batch, algorithm: AlgorithmSection, seed: int) -> None:
    """Add ``correction``, if the resolved ``algorithm`` has one, and its loss's own columns.

    Args:
        batch: a rollout batch with ``advantages``, ``old_logprobs`` and, for a correction, ``behaviour_logprobs``.
        seed: for a loss that draws at random.
    """
    if not isinstance(algorithm.correction, NoCorrection):
        old, sampler = (batch.split(batch.columns[name]) for name in ("old_logprobs", "behaviour_logprobs"))
        weights = [correction_weights(algorithm.correction, *pair) for pair in zip(old, sampler, strict=True)]
        batch.add("correction", np.concatenate([np.zeros(0), *weights]))
    for name, values in algorithm.loss.columns(batch, np.random.default_rng(seed)).items():
        batch.add(OWN + name, values)
