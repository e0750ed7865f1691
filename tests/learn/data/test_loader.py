"""The order is a function of seed and position; the position can be saved and continued exactly."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tunesmith.errors import CheckpointError
from tunesmith.learn.data.loader import Loader, Part, fingerprint_of
from tunesmith.types import Task


def loader(sizes: list[int], weights: list[float] | None = None, **settings: Any) -> Loader[int]:
    parts: list[Part] = []
    for i, size in enumerate(sizes):
        start = parts[-1].stop if parts else 0
        parts.append(Part(f"s{i}", start, start + size, weights[i] if weights else 1.0))
    return Loader(list(range(sum(sizes))), parts=parts, **settings)


SHAPE = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    sizes=SHAPE,
    weights=st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
    before=st.lists(st.integers(0, 9), max_size=4),
    after=st.lists(st.integers(0, 9), max_size=4),
)
def test_a_restored_loader_continues_exactly(
    sizes: list[int],
    weights: list[float],
    shuffle: bool,
    seed: int,
    before: list[int],
    after: list[int],
) -> None:
    straight = loader(sizes, weights, shuffle=shuffle, seed=seed)
    for n in before:
        straight.take(n)
    saved = json.loads(json.dumps(straight.state_dict()))
    resumed = loader(sizes, weights, shuffle=shuffle, seed=seed)
    resumed.take(3)
    resumed.load_state_dict(saved)
    assert [resumed.take(n) for n in after] == [straight.take(n) for n in after]
    assert resumed.state_dict() == straight.state_dict()


@given(sizes=SHAPE, shuffle=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_each_part_gives_each_of_its_items_once_an_epoch(
    sizes: list[int], shuffle: bool, seed: int
) -> None:
    made = loader(sizes, shuffle=shuffle, seed=seed)
    drawn = made.take(60)
    for part in made.parts:
        own = [item for item in drawn if part.start <= item < part.stop]
        for start in range(0, len(own) - len(part) + 1, len(part)):
            assert sorted(own[start : start + len(part)]) == list(range(part.start, part.stop))


def test_order_without_shuffling_and_epochs() -> None:
    made = loader([3], shuffle=False, batch_size=2)
    assert [made.next_batch() for _ in range(3)] == [[0, 1], [2], [0, 1]]
    assert (made.epoch, made.drawn, made.state_dict()["taken"]) == (1, 5, [5])


def test_shuffling_differs_by_seed_and_epoch_and_ignores_global_randomness() -> None:
    random.seed(1)
    before = random.getstate()
    made = loader([50], seed=3)
    first = made.take(50)
    second = made.take(50)
    assert random.getstate() == before
    assert first != second and sorted(first) == sorted(second) != first
    random.seed(2)
    assert loader([50], seed=3).take(50) == first != loader([50], seed=4).take(50)


def test_the_order_is_pinned() -> None:
    """A checkpoint made by an earlier version must continue in the same order."""
    assert loader([6], seed=7).take(12) == [2, 3, 5, 0, 1, 4, 0, 2, 5, 3, 4, 1]


def test_weights_are_shares_of_the_draws() -> None:
    made = loader([10, 1000], weights=[3.0, 1.0], seed=0)
    counts = Counter(item < 10 for item in made.take(8000))
    assert counts[True] / 8000 == pytest.approx(0.75, abs=0.02)  # four standard deviations
    assert made.state_dict()["taken"][0] == counts[True] and made.epoch == 2000 // 1000


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: Loader(list("abd"), seed=0), "the data set has changed"),
        (lambda: Loader(list("abc"), seed=1), r"data\.seed has changed"),
        (lambda: Loader(list("abc"), shuffle=False), r"data\.shuffle has changed"),
        (
            lambda: Loader(list("abc"), parts=[Part("x", 0, 1), Part("y", 1, 3)]),
            "the mixture of data sources has changed",
        ),
    ],
)
def test_a_position_in_other_data_is_refused(other: Any, reason: str) -> None:
    state = Loader(list("abc"), seed=0).state_dict()
    with pytest.raises(CheckpointError, match=reason):
        other().load_state_dict(state)


def test_a_damaged_position_is_refused() -> None:
    made = loader([3])
    with pytest.raises(CheckpointError, match="damaged"):
        made.load_state_dict({**made.state_dict(), "taken": [1, 2]})
    with pytest.raises(CheckpointError, match="no 'taken'"):
        made.load_state_dict({"seed": 0})


def test_fingerprints_see_content_and_order() -> None:
    tasks = [Task("1", "a", (1, 2), {"answer": "x"}), Task("2", "b", (3,), {"answer": "y"})]
    same = [Task("1", "a", (1, 2), {"answer": "x"}), Task("2", "b", (3,), {"answer": "y"})]
    assert fingerprint_of(tasks) == fingerprint_of(same) != fingerprint_of(tasks[::-1])
    assert fingerprint_of(tasks) != fingerprint_of(
        [tasks[0], Task("2", "b", (3,), {"answer": "z"})]
    )


def test_the_fingerprint_of_a_picture_is_that_of_its_content() -> None:
    red, same, blue = [
        fingerprint_of([{"shown": [Image.new("RGB", (2, 3), color)]}])
        for color in ("red", "red", "blue")
    ]
    assert red == same != blue
