"""The aggregation of token losses into one number: a weight per token, known before the first
micro-batch runs.

Every aggregation is a weighted sum of token losses, so a micro-batch contributes ``sum(weight *
loss)``, and the micro-batches of a step add up to the batch's loss for any split. With ``B``
sequences, ``N`` loss tokens in total, ``|y|`` loss tokens in a sequence and a constant length ``L``
(``max_new_tokens``), the weight of a token is

    token_mean               1 / N
    seq_mean_token_mean      1 / (B |y|)
    seq_mean_token_sum       1 / B
    seq_mean_token_sum_norm  1 / (B L)         Dr. GRPO, arXiv:2503.20783

The samples of one rollout (whose records have forked) count as one sequence. A token with a
non-finite input counts in neither numerator nor denominator, nor does a sequence without loss
tokens (as in verl and OpenRLHF; TRL counts fully masked ones).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tunesmith.learn.data.batch import Batch, Floats, Ints

WEIGHT = "weight"
"""Column: a token's weight in the loss."""
METRIC_WEIGHT = "metric_weight"
"""Column: a token's weight in a metric, a mean over the optimizer batch's tokens."""
OUT_OF = "/of"
"""After the name of a metric that is a share: the number of things that it is a share of."""


def sequence_weights(
    counts: Ints, aggregation: str, max_new_tokens: int | None = None, rollouts: Ints | None = None
) -> Floats:
    """The weight per token of each sample, ``[S]``, from ``counts [S]`` of loss tokens.

    Samples with the same number in ``rollouts`` are one sequence; None: every sample is one.

    Example:
        >>> sequence_weights(np.array([1, 3]), "seq_mean_token_mean").round(3).tolist()
        [0.5, 0.167]
        >>> sequence_weights(np.array([2, 1, 1]), "seq_mean_token_mean", rollouts=np.array([0, 1,
        1])).tolist() [0.25, 0.25, 0.25]
    """
    owners = np.arange(len(counts)) if rollouts is None else rollouts
    lengths = np.bincount(owners, counts)
    sequences = float((lengths > 0).sum())
    match aggregation:
        case "token_mean":
            divisors = counts.sum()
        case "seq_mean_token_mean":
            divisors = sequences * lengths[owners]
        case "seq_mean_token_sum":
            divisors = sequences
        case "seq_mean_token_sum_norm":
            assert max_new_tokens is not None, "seq_mean_token_sum_norm divides by max_new_tokens"
            divisors = sequences * max_new_tokens
        case _:
            raise AssertionError(f"no aggregation '{aggregation}'")
    return (counts > 0) / np.maximum(divisors, 1.0)


def weigh(batch: Batch, aggregation: str, max_new_tokens: int | None = None) -> None:
    """Add the columns ``weight`` and ``metric_weight`` to an optimizer batch; both are 0 for a
    dropped token."""
    counts = np.bincount(batch.sample[batch.finite], minlength=batch.num_samples)
    weights = sequence_weights(counts, aggregation, max_new_tokens, batch.owners)
    batch.add(WEIGHT, weights[batch.sample] * batch.finite)
    batch.add(METRIC_WEIGHT, batch.finite / max(1, int(counts.sum())))


def with_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an optimizer batch, where ``name`` and ``name/of`` were counts, with ``name``
    as a share.

    Sums of weights can round to more than 1; counts add up exactly. A share of nothing is 0.
    """
    shares = dict(metrics)
    for name in metrics:
        of = shares.pop(name + OUT_OF, None)
        if of is not None:
            shares[name] = metrics[name] / of if of else 0.0
    return shares
