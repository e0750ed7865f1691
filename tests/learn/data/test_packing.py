"""Micro-batches: the cap is hard, nothing is lost, siblings stay together, costs are even."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.costs import CostModel
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.packing import SampleTooLong, pack
from tunesmith.learn.data.trie import num_forest_tokens
from tunesmith.types import Sample


def completion(prompt: list[int], length: int) -> Sample:
    return Sample(prompt + [9] * length, [False] * len(prompt) + [True] * length)


def tokens(samples: list[Sample], bins: list[list[int]], share: bool = True) -> list[int]:
    return [num_forest_tokens(Batch.of(samples), b, share=share) for b in bins]


def test_a_group_is_one_micro_batch_where_it_fits() -> None:
    samples = [completion([p] * 4, n) for n in (1, 2, 3) for p in (1, 2)]
    assert pack(Batch.of(samples), 10) == [[0, 2, 4], [1, 3, 5]]
    assert pack(Batch.of(samples), 20) == [[0, 1, 2, 3, 4, 5]]


def test_a_tree_over_the_cap_is_split_with_its_prefix_repeated() -> None:
    samples = [completion([1] * 10, 5) for _ in range(4)]
    bins = pack(Batch.of(samples), 20)
    assert sorted(len(b) for b in bins) == [2, 2]
    assert tokens(samples, bins) == [20, 20]


def test_a_token_common_to_all_does_not_glue_groups_together() -> None:
    samples = [completion([0, p, p, p], 4) for p in (1, 2, 3, 4) for _ in range(2)]
    bins = pack(Batch.of(samples), 12)
    assert [sorted({samples[i].token_ids[1] for i in b}) for b in bins] == [[1], [2], [3], [4]]


def test_costs_are_evened_out() -> None:
    samples = [completion([p], n) for p, n in enumerate([99, 49, 49, 49, 49, 99])]
    bins = pack(Batch.of(samples), 200)
    assert sorted(tokens(samples, bins)) == [200, 200]
    rng = random.Random(0)
    quadratic = CostModel(linear=0.0, quadratic=1.0)
    samples = [completion([p], rng.randrange(10, 200)) for p in range(60)]
    bins = pack(Batch.of(samples), 1000, cost=quadratic, multiple_of=4)
    loads = [sum(quadratic.prefix(len(samples[i].token_ids)) for i in b) for b in bins]
    assert len(bins) % 4 == 0 and max(loads) < 1.02 * min(loads)


def test_ranks_keep_siblings_together() -> None:
    rng = random.Random(0)
    samples = [completion([p] * 400, rng.randrange(50, 150)) for p in range(10) for _ in range(8)]
    alone, ranked = (pack(Batch.of(samples), 900, multiple_of=ranks) for ranks in (1, 8))
    assert len(alone) == 23 and 16 < len(ranked) <= 24
    assert sum(tokens(samples, ranked)) < 1.05 * sum(tokens(samples, alone))


def test_costs_follow_the_formula() -> None:
    cost = CostModel.of_decoder(
        parameters=10, layers=2, heads=3, head_dim=4, vocabulary=7, hidden=5
    )
    assert cost.prefix(1) == 6 * 10 + 12 * 2 * 3 * 4
    assert cost.prefix(3) == 3 * 6 * 10 + 6 * 12 * 2 * 3 * 4
    assert cost.head == 6 * 7 * 5


def test_a_sample_over_the_cap_is_named() -> None:
    with pytest.raises(
        SampleTooLong, match=r"sample 1 has 9 tokens.*\(8\).*max_tokens_per_microbatch"
    ):
        pack(Batch.of([completion([1], 3), completion([1], 8)]), 8)


def test_nothing_to_pack() -> None:
    assert pack(Batch.of([]), 10) == []


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    prompts = draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=5)
    )
    return [
        completion(draw(st.sampled_from(prompts)), draw(st.integers(0, 9)))
        for _ in range(draw(st.integers(1, 25)))
    ]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(17, 60), st.booleans())
def test_every_sample_once_and_never_over_the_cap(
    samples: list[Sample], cap: int, share: bool
) -> None:
    bins = pack(Batch.of(samples), cap, share=share)
    assert sorted(i for b in bins for i in b) == list(range(len(samples)))
    assert all(b == sorted(b) and b for b in bins)
    sizes = tokens(samples, bins, share)
    assert max(sizes) <= cap
    assert bins == pack(Batch.of(samples), cap, share=share)
    if not share:
        # Best fit decreasing never leaves two bins that would fit into one, so half of the bound is
        # certain.
        assert len(bins) <= 2 * -(-sum(sizes) // cap)


def test_few_bins() -> None:
    rng = random.Random(0)
    samples = [completion([i % 7, i], rng.randrange(10, 500)) for i in range(300)]
    bins = pack(Batch.of(samples), 2048)
    assert len(bins) <= 1 + -(-num_forest_tokens(Batch.of(samples)) // 2048)
    sizes = tokens(samples, bins)
    assert min(sizes) > 0.9 * max(sizes)


def test_no_torch() -> None:
    code = "import sys, tunesmith.learn.data.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
