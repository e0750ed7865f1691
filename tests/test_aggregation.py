from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from micro import random_samples
from tunesmith.algorithms.aggregation import finite_mask, sequence_weights, token_weights, weigh
from tunesmith.types import Sample

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


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
    weights = sequence_weights([1, 3], aggregation, 8)
    total = sum(w * sum(sequence) for w, sequence in zip(weights, losses, strict=True))
    assert total == pytest.approx(float(expected), abs=1e-15)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from(AGGREGATIONS))
def test_sequences_without_loss_tokens_count_nowhere(counts: list[int], aggregation: str) -> None:
    weights = sequence_weights(counts, aggregation, 16)
    kept = [c for c in counts if c]
    assert [w for w, c in zip(weights, counts, strict=True) if c] == sequence_weights(kept, aggregation, 16)
    assert all(w == 0 for w, c in zip(weights, counts, strict=True) if not c)
    if kept and aggregation.endswith("_mean"):
        assert sum(w * c for w, c in zip(weights, counts, strict=True)) == pytest.approx(1.0)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_a_rollout_weighs_the_same_however_often_it_forked(rollouts: list[list[int]], data: st.DataObject) -> None:
    aggregation = data.draw(st.sampled_from(AGGREGATIONS))
    whole = sequence_weights([sum(parts) for parts in rollouts], aggregation, 16)
    flat = data.draw(st.permutations([(i, n) for i, parts in enumerate(rollouts) for n in parts]))
    owners, counts = [i for i, _ in flat], [n for _, n in flat]
    forked = sequence_weights(counts, aggregation, 16, owners)
    assert forked == [whole[i] if n else 0.0 for i, n in flat]


def test_nothing_left_is_no_error() -> None:
    assert sequence_weights([0, 0], "token_mean") == [0.0, 0.0]
    assert weigh([], "token_mean") == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_leaves_numerator_and_denominator(bad: float) -> None:
    sample = Sample([1, 2, 3], [False, True, True], {"advantages": [bad, 1.0, bad], "old_logprobs": [0.0] * 3})
    other = Sample([1, 2], [False, True], {"advantages": [0.0, 1.0], "old_logprobs": [0.0] * 2})
    assert finite_mask(sample).tolist() == [False, True, False]
    assert token_weights([sample, other], "token_mean") == [[0, 0.5, 0], [0, 0.5]]
    assert token_weights([sample, other], "seq_mean_token_mean") == [[0, 0.5, 0], [0, 0.5]]


def test_weigh_adds_weight_and_metric_weight() -> None:
    samples = weigh(random_samples(0, lengths=(1, 3)), "seq_mean_token_sum", 8)
    assert [s.columns["weight"] for s in samples] == [[0, 0, 0.5], [0, 0, 0.5, 0.5, 0.5]]
    assert np.concatenate([s.columns["metric_weight"] for s in samples]).sum() == pytest.approx(1.0)


def test_a_constant_length_is_needed_for_the_norm() -> None:
    with pytest.raises(AssertionError, match="max_new_tokens"):
        sequence_weights([1], "seq_mean_token_sum_norm")
