"""How per-token losses become one number: a weight per token, known before the first micro-batch runs.

Every aggregation of an optimizer batch is a weighted sum of its per-token losses, so the scalar of a
micro-batch is ``sum(weight * loss)`` and the micro-batches of a step add up to the batch's loss however it
was cut. With ``B`` sequences, ``N`` loss tokens in all, ``|y|`` loss tokens in a sequence and a constant
length ``L`` (``max_new_tokens``), a token weighs (the samples of one rollout, whose records have forked, are one
sequence here: they share its weight)

    token_mean               1 / N
    seq_mean_token_mean      1 / (B |y|)
    seq_mean_token_sum       1 / B
    seq_mean_token_sum_norm  1 / (B L)         Dr. GRPO, arXiv:2503.20783

A token with a non-finite input leaves both the numerator and the denominators; so does a sequence without
loss tokens (verl and OpenRLHF count sequences the same way; TRL counts fully masked ones too).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tunesmith.types import Sample

WEIGHT = "weight"
"""Column of a token's weight in the loss."""
METRIC_WEIGHT = "metric_weight"
"""Column of a token's weight in a mean over the optimizer batch's tokens: what metrics are summed with."""


def finite_mask(sample: Sample) -> NDArray[np.bool_]:
    """The loss tokens of a sample whose every column is finite, ``[L]``."""
    mask = np.array(sample.loss_mask, dtype=np.bool_)
    for column in sample.columns.values():
        mask &= np.isfinite(np.array(column, dtype=np.float64))
    return mask


def sequence_weights(
    counts: Sequence[int],
    aggregation: str,
    max_new_tokens: int | None = None,
    rollouts: Sequence[int] | None = None,
) -> list[float]:
    """Weight of each token of samples with ``counts`` loss tokens, one number per sample.

    Samples with the same number in ``rollouts`` are one sequence; left out, each is its own.

    Example:
        >>> sequence_weights([1, 3], "seq_mean_token_mean")
        [0.5, 0.16666666666666666]
        >>> sequence_weights([2, 1, 1], "seq_mean_token_mean", rollouts=[0, 1, 1])
        [0.25, 0.25, 0.25]
    """
    owners = range(len(counts)) if rollouts is None else rollouts
    lengths: Counter[int] = Counter()
    for owner, count in zip(owners, counts, strict=True):
        lengths[owner] += count
    tokens, sequences = sum(counts), sum(length > 0 for length in lengths.values())
    match aggregation:
        case "token_mean":
            divisors = [tokens for _ in counts]
        case "seq_mean_token_mean":
            divisors = [sequences * lengths[owner] for owner in owners]
        case "seq_mean_token_sum":
            divisors = [sequences for _ in counts]
        case "seq_mean_token_sum_norm":
            assert max_new_tokens is not None, "seq_mean_token_sum_norm divides by max_new_tokens"
            divisors = [sequences * max_new_tokens for _ in counts]
        case _:
            raise AssertionError(f"no aggregation '{aggregation}'")
    return [1.0 / d if c else 0.0 for c, d in zip(counts, divisors, strict=True)]


def token_weights(samples: Sequence[Sample], aggregation: str, max_new_tokens: int | None = None) -> list[list[float]]:
    """Weight of every token of an optimizer batch, ``[L]`` per sample; 0 where there is no loss."""
    masks = [finite_mask(s) for s in samples]
    owners = rollouts_of(samples)
    weights = sequence_weights([int(m.sum()) for m in masks], aggregation, max_new_tokens, owners)
    return [(m * w).tolist() for m, w in zip(masks, weights, strict=True)]


def rollouts_of(samples: Sequence[Sample]) -> list[int]:
    """The rollout that each sample is of; a negative number of its own where there are no rollouts."""
    return [s.rollout if s.rollout >= 0 else -1 - place for place, s in enumerate(samples)]


def weigh(samples: Sequence[Sample], aggregation: str, max_new_tokens: int | None = None) -> list[Sample]:
    """The samples of one optimizer batch with the columns ``weight`` and ``metric_weight``."""
    weights = token_weights(samples, aggregation, max_new_tokens)
    shares = token_weights(samples, "token_mean")
    return [
        replace(s, columns={**s.columns, WEIGHT: w, METRIC_WEIGHT: m})
        for s, w, m in zip(samples, weights, shares, strict=True)
    ]
