from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.micro import batch_of, random_batch
from tunesmith.learn.algorithms.aggregation import sequence_weights, weigh
from tunesmith.learn.data.batch import Batch

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Sums 3 and 12 of two sequences with 1 and 3 tokens, L = 8.
        ("token_mean", Fraction(15, 4)),
        ("seq_mean_token_mean", Fraction(7, 2)),
        ("seq_mean_token_sum", Fraction(15, 2)),
        ("seq_mean_token_sum_norm", Fraction(15, 16)),
    ],
)
def test_weights_by_hand(aggregation: str, expected: Fraction) -> None:
    losses = [[3.0], [2.0, 4.0, 6.0]]
    weights = sequence_weights(np.array([1, 3]), aggregation, 8)
    total = sum(w * sum(sequence) for w, sequence in zip(weights, losses, strict=True))
    assert total == pytest.approx(float(expected), abs=1e-15)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from(AGGREGATIONS))
def test_sequences_without_loss_tokens_count_nowhere(counts: list[int], aggregation: str) -> None:
    lengths = np.array(counts)
    weights = sequence_weights(lengths, aggregation, 16)
    assert (
        weights[lengths > 0].tolist()
        == sequence_weights(lengths[lengths > 0], aggregation, 16).tolist()
    )
    assert not weights[lengths == 0].any()
    if lengths.any() and aggregation.endswith("_mean"):
        assert (weights * lengths).sum() == pytest.approx(1.0)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5), st.data()
)
def test_a_rollout_weighs_the_same_however_often_it_forked(
    rollouts: list[list[int]], data: st.DataObject
) -> None:
    aggregation = data.draw(st.sampled_from(AGGREGATIONS))
    whole = sequence_weights(np.array([sum(parts) for parts in rollouts]), aggregation, 16)
    flat = data.draw(st.permutations([(i, n) for i, parts in enumerate(rollouts) for n in parts]))
    owners, counts = (np.array(column) for column in zip(*flat, strict=True))
    forked = sequence_weights(counts, aggregation, 16, owners)
    assert forked.tolist() == np.where(counts > 0, whole[owners], 0.0).tolist()


def test_nothing_left_is_no_error() -> None:
    assert sequence_weights(np.array([0, 0]), "token_mean").tolist() == [0.0, 0.0]
    nothing = Batch.of([])
    weigh(nothing, "token_mean")
    assert not nothing.columns["weight"].size


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_leaves_numerator_and_denominator(bad: float) -> None:
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        batch = batch_of((2, 1), {"advantages": [1.0, bad, 1.0], "old_logprobs": [0.0] * 3})
        assert batch.finite.tolist() == [True, False, True]
        weigh(batch, aggregation)
        assert batch.columns["weight"].tolist() == [0.5, 0, 0.5]


def test_weigh_adds_weight_and_metric_weight() -> None:
    batch = random_batch(0, lengths=(1, 3))
    weigh(batch, "seq_mean_token_sum", 8)
    assert batch.columns["weight"].tolist() == [0.5] * 4
    assert batch.columns["metric_weight"].tolist() == [0.25] * 4


def test_a_constant_length_is_needed_for_the_norm() -> None:
    with pytest.raises(AssertionError, match="max_new_tokens"):
        sequence_weights(np.array([1]), "seq_mean_token_sum_norm")
