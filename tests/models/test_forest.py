"""The forest holds every sample exactly, shares what may be shared, and nothing else."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest, gather
from tunesmith.learn.data.trie import num_forest_tokens
from tunesmith.models.forest import Forest, Segment, subtree_ends, within_chunks
from tunesmith.types import Sample


def sample(text: list[int], loss: str) -> Sample:
    return Sample(text, [c == "x" for c in loss])


def path(forest: Forest, segment: int) -> list[int]:
    """Rows of a segment and all of its ancestors, from the root on."""
    rows: list[int] = []
    while segment >= 0:
        start, length, segment = forest.segments[segment]
        rows = [*range(start, start + length), *rows]
    return rows


def segment_of(forest: Forest, row: int) -> int:
    return next(i for i, s in enumerate(forest.segments) if s.start <= row < s.start + s.length)


def check_invariants(forest: Forest, samples: list[Sample], share: bool) -> None:
    chosen = [samples[i] for i in forest.sample_ids]
    row = 0
    for i, segment in enumerate(forest.segments):
        assert segment.length > 0 and segment.start == row and segment.parent < i
        assert (
            segment.parent < 0
            or i == segment.parent + 1
            or segment_of(forest, row - 1) >= segment.parent
        )
        row += segment.length
        assert forest.position_ids[path(forest, i)].tolist() == list(range(len(path(forest, i))))
    assert row == forest.num_tokens == num_forest_tokens(Batch.of(chosen), share=share)
    children = [s.parent for s in forest.segments if s.parent >= 0]
    assert all(children.count(p) > 1 for p in children), "an only child should continue its parent"
    for s, one in enumerate(chosen):
        mine = (forest.sample == s).nonzero()[:, 0]
        predicted = [t for t, loss in enumerate(one.loss_mask) if loss]
        assert forest.targets[mine].tolist() == [one.token_ids[t] for t in predicted]
        for source, t in zip(forest.source[mine].tolist(), predicted, strict=True):
            rows = path(forest, segment_of(forest, source))
            seen = rows[: rows.index(source) + 1]
            assert forest.token_ids[seen].tolist() == one.token_ids[:t]
        last = path(forest, segment_of(forest, int(forest.ends[s])))
        assert (
            forest.token_ids[last[: last.index(int(forest.ends[s])) + 1]].tolist() == one.token_ids
        )
    assert forest.sample.tolist() == sorted(forest.sample.tolist())
    assert forest.predictions.tolist() == list(range(len(forest.predictions)))


def test_prompt_with_two_completions() -> None:
    batch = Batch.of([sample([5, 6, 7, 2], "..xx"), sample([5, 6, 8], "..x")])
    batch.add("advantages", [0.5, 0.25, -1])
    batch.add_per_sample("side", [1, -1])
    forest = gather(build_forest(batch), batch)
    assert forest.token_ids.tolist() == [5, 6, 7, 2, 8]
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert forest.segments == (Segment(0, 2, -1), Segment(2, 2, 0), Segment(4, 1, 0))
    assert forest.source.tolist() == [1, 2, 1]
    assert forest.targets.tolist() == [7, 2, 8]
    assert forest.sample.tolist() == [0, 0, 1]
    assert forest.columns["advantages"].tolist() == [0.5, 0.25, -1]
    assert forest.columns["advantages"].dtype == torch.float32
    assert forest.per_sample["side"].tolist() == [1, -1]


def test_without_sharing_every_sample_is_a_root() -> None:
    group = [sample([5, 6, 7], "..x"), sample([5, 6, 8], "..x")]
    forest = build_forest(Batch.of(group), share=False)
    assert forest.token_ids.tolist() == [5, 6, 7, 5, 6, 8]
    assert [s.parent for s in forest.segments] == [-1, -1]


def test_loss_tokens_are_never_shared() -> None:
    twins = [sample([5, 6, 7, 8], ".xx."), sample([5, 6, 7, 8], "..xx")]
    forest = build_forest(Batch.of(twins))
    assert forest.segments == (Segment(0, 1, -1), Segment(1, 3, 0), Segment(4, 3, 0))


def test_forked_conversation_has_parents_two_deep() -> None:
    samples = [
        sample([1, 2, 3, 4, 9], "....x"),
        sample([1, 2, 3, 4, 8], "....x"),
        sample([1, 2, 5, 9], "...x"),
    ]
    forest = build_forest(Batch.of(samples))
    assert forest.segments == (
        Segment(0, 2, -1),
        Segment(2, 2, 0),
        Segment(4, 1, 1),
        Segment(5, 1, 1),
        Segment(6, 2, 0),
    )
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 2, 3]
    check_invariants(forest, samples, True)


def test_a_sample_that_continues_another_is_one_segment() -> None:
    samples = [sample([1, 2], ".."), sample([1, 2, 3, 4], "...x"), sample([1, 2], "..")]
    forest = build_forest(Batch.of(samples))
    assert forest.segments == (Segment(0, 4, -1),)
    assert forest.sample_ids == (0, 1, 2) and forest.sample.tolist() == [1]


def test_one_token_and_no_loss() -> None:
    forest = build_forest(Batch.of([sample([4], "."), sample([4], "."), sample([7], ".")]))
    assert (
        forest.num_tokens == 2
        and forest.targets.numel() == 0
        and forest.source.dtype == torch.int64
    )


def test_empty_forest() -> None:
    forest = build_forest(Batch.of([]))
    assert (
        forest.num_tokens == 0 and forest.segments == () and forest.token_ids.dtype == torch.int64
    )


def test_indices_choose_and_order() -> None:
    samples = [sample([5, 6, 7], "..x"), sample([1, 2], ".x"), sample([5, 6, 8], "..x")]
    batch = Batch.of(samples)
    batch.add("order", [0, 1, 2])
    forest = gather(build_forest(batch, [2, 0]), batch)
    assert forest.sample_ids == (2, 0) and forest.targets.tolist() == [8, 7]
    assert forest.columns["order"].tolist() == [2, 0] and forest.predictions.tolist() == [2, 0]


def test_columns_follow_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    batch = Batch.of([sample([1, 2], ".x")])
    batch.add("a", [0.1])
    try:
        forest = gather(build_forest(batch), batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert forest.columns["a"].dtype == torch.float64 and forest.columns["a"].item() == 0.1


@pytest.mark.parametrize(
    "bad",
    [
        Sample([], []),
        Sample([1, 2], [False]),
        Sample([1, 2], [True, False]),
    ],
)
def test_malformed_samples_are_refused(bad: Sample) -> None:
    with pytest.raises(AssertionError):
        Batch.of([bad])


def test_a_column_has_a_value_for_each_prediction_or_sample() -> None:
    batch = Batch.of([sample([1, 2, 3], ".xx")])
    with pytest.raises(AssertionError):
        batch.add("a", [1.0])
    with pytest.raises(AssertionError):
        batch.add_per_sample("a", [1.0, 2.0])


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    def one() -> Sample:
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
        first = draw(st.integers(1, 8))
        mask = [t >= first and draw(st.booleans()) for t in range(len(tokens))]
        return Sample(tokens, mask)

    return [one() for _ in range(draw(st.integers(1, 9)))]


@settings(max_examples=300, deadline=None)
@given(batches(), st.booleans())
@pytest.mark.more
def test_every_forest_holds_its_samples(samples: list[Sample], share: bool) -> None:
    check_invariants(build_forest(Batch.of(samples), share=share), samples, share)


@pytest.mark.more
def test_a_deep_trie_does_not_exhaust_the_stack() -> None:
    samples = [
        sample([*range(n), 5000], "." * n + "x") for n in range(1, 1200)
    ]  # above the recursion limit
    assert num_forest_tokens(Batch.of(samples)) == 1199 + 1199
    assert build_forest(Batch.of(samples)).num_tokens == 2398


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_a_part_of_a_batch_is_the_batch_of_those_samples(
    samples: list[Sample], data: st.DataObject
) -> None:
    batch = Batch.of(samples)
    batch.add("place", range(batch.num_predictions))
    batch.add_per_sample("number", [float("nan"), *range(1, len(samples))])
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), unique=True))
    part = batch.take(chosen)
    expected = Batch.of([samples[i] for i in chosen])
    for name in (
        "token_ids",
        "offsets",
        "predicted",
        "sample",
        "group",
        "rollout",
        "lengths",
        "counts",
    ):
        assert getattr(part, name).tolist() == getattr(expected, name).tolist(), name
    assert (
        part.columns["place"].tolist() == batch.predictions_of(np.array(chosen, np.int64)).tolist()
    )
    assert part.finite.tolist() == [chosen[s] != 0 for s in part.sample]
    assert batch.take(range(len(samples))) is batch


def test_a_forest_within_chunks_sees_only_its_own_run_of_positions() -> None:
    """A prompt of 5, completions of 4 and 2, one of which goes on twice; runs of 3 positions."""
    segments = [
        Segment(0, 5, -1),
        Segment(5, 4, 0),
        Segment(9, 2, 1),
        Segment(11, 1, 1),
        Segment(12, 2, 0),
        Segment(14, 6, -1),
    ]
    cut, rows = within_chunks(segments, 3)
    assert sorted(rows) == list(range(20))
    assert [segment.start for segment in cut] == [0, *accumulate(s.length for s in cut[:-1])]
    assert subtree_ends(cut)[1] == 7  # what continues the prompt's second run lies behind it
    want = seen(segments)
    ages = want.sum(1) - 1  # the position of each row in its sequence
    together = ages[:, None] // 3 == ages // 3
    assert seen(cut)[torch.tensor(rows).argsort()][:, torch.tensor(rows).argsort()].equal(
        want & together
    )


def seen(segments: list[Segment]) -> torch.Tensor:
    """``[T, T]`` bool: whether a row sees a column, by the definition of a forest."""
    total = sum(segment.length for segment in segments)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for start, length, parent in segments:
        own = slice(start, start + length)
        mask[own, own] = torch.ones(length, length).tril().bool()
        while parent >= 0:
            above = segments[parent]
            mask[own, above.start : above.start + above.length] = True
            parent = above.parent
    return mask
