"""What a run tells the doctor about its data."""

from __future__ import annotations

import pytest

from tunesmith.learn.data.preference import Comparison
from tunesmith.models.vision.rows import FIRST_ROW
from tunesmith.run.assembly.learning import content_of
from tunesmith.types import Sample, Task

INSTRUCTIONS = list(range(200))


def items(question: int) -> tuple[object, ...]:
    """A prompt, a sample and a pair: a question between instructions that all of them have."""
    ids = [*INSTRUCTIONS, question, *INSTRUCTIONS]
    sample = Sample(ids, [True] * len(ids))
    return Task("t", "", tuple(ids)), sample, Comparison((sample, sample))


@pytest.mark.parametrize(("one", "other"), [(500, 501), (FIRST_ROW, FIRST_ROW + 1)])
def test_items_that_differ_between_long_instructions_are_no_duplicates(
    one: int, other: int
) -> None:
    """In a token, or in a row of an image."""
    for first, same, second in zip(items(one), items(one), items(other), strict=True):
        assert content_of(first) == content_of(same) != content_of(second)
