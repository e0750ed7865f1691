"""What a run tells the doctor about its data."""

from __future__ import annotations

from tunesmith.learn.data.preference import Comparison
from tunesmith.run.assembly.learning import content_of
from tunesmith.types import Sample, Task

INSTRUCTIONS = list(range(200))


def items(question: int) -> tuple[object, ...]:
    """A prompt, a sample and a pair: a question between instructions that all of them have."""
    ids = [*INSTRUCTIONS, question, *INSTRUCTIONS]
    sample = Sample(ids, [True] * len(ids))
    return Task("t", "", tuple(ids)), sample, Comparison((sample, sample))


def test_items_that_differ_between_long_instructions_are_no_duplicates() -> None:
    for one, same, other in zip(items(500), items(500), items(501), strict=True):
        assert content_of(one) == content_of(same) != content_of(other)
