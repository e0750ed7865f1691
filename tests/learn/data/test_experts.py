"""Experts that were recorded with tokens stay with them, from completions to forests."""

from __future__ import annotations

import struct

from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.types import Completion, ExpertChoices, Record, Sample


def chosen(*experts: int) -> ExpertChoices:
    """One router, and one expert of each token."""
    return ExpertChoices(2, struct.pack(f"{len(experts)}h", *experts))


def test_a_record_keeps_the_experts_with_which_each_token_was_read_first() -> None:
    record = Record()
    record.observe([5, 6])
    record.act(Completion([7, 8], [0.0, 0.0], [0, 0], "stop", chosen(1, 2, 3)))
    record.observe([9])
    record.act(Completion([4], [0.0], [1], "stop", chosen(7, 7, 7, 4, 5)))
    assert record.experts == chosen(1, 2, 3, 4, 5)
    record.cut(6)
    assert record.experts == chosen(1, 2, 3, 4, 5)


def test_prompts_are_shared_as_far_as_their_experts_are_equal() -> None:
    mask = [False, False, False, True]
    samples = [
        Sample([5, 6, 7, 8], mask, experts=chosen(1, 2, 3)),
        Sample([5, 6, 7, 9], mask, experts=chosen(1, 2, 0)),
        Sample([5, 6, 7, 4], mask, experts=chosen(1, 2, 3)),
    ]
    forest = build_forest(Batch.of(samples).take([2, 0, 1]))
    assert forest.num_tokens == 2 + 1 + 2 + 2
    assert forest.experts is not None
    found = set(zip(forest.token_ids.tolist(), forest.experts[:, 0].tolist(), strict=True))
    assert found == {(5, 1), (6, 2), (7, 3), (7, 0), (8, -1), (9, -1), (4, -1)}
    assert sorted(forest.copies.tolist()) == [1, 1, 1, 1, 2, 3, 3]
