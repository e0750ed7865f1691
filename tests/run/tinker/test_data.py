"""Datums as forests."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.costs import CostModel
from tunesmith.errors import UserError
from tunesmith.run.tinker.data import Datum, Datums

COST = CostModel()


def test_each_value_is_predicted_at_its_token() -> None:
    """Targets are the datum's own; a token may have several; a common prefix is laid out once."""
    one = Datum([5, 6, 7], {
        "target_tokens": np.array([[1, 2], [3, 4], [5, 6]]),
        "weights": np.arange(6, dtype=np.float32).reshape(3, 2),
    })  # fmt: skip
    two = Datum([5, 9], {
        "target_tokens": np.array([7, 8]),
        "weights": np.array([6.0, 7.0], np.float32),
    })  # fmt: skip
    datums = Datums([one, two])
    datums.check(vocabulary=10, context=3)
    packing = datums.packing(100, COST)
    (forest,) = packing.forests
    seen = dict.fromkeys(range(8), (0, 0, 0.0))
    for n, place in enumerate(forest.predictions.tolist()):
        reads = int(forest.token_ids[forest.source[n]])
        seen[place] = (reads, int(forest.targets[n]), float(forest.columns["weights"][n]))
    read = [5, 5, 6, 6, 7, 7, 5, 9]
    assert seen == {n: (read[n], n + 1, float(n)) for n in range(8)}
    assert (forest.token_ids == 5).sum() == 1
    parts = datums.split(np.arange(8.0))
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3], [4, 5]], [6, 7]]


def test_every_value_is_in_one_micro_batch() -> None:
    datums = Datums([Datum([n] * 3, {"target_tokens": np.full(3, n)}) for n in range(1, 6)])
    packing = datums.packing(8, COST)
    places = [place for forest in packing.forests for place in forest.predictions.tolist()]
    assert len(packing) == 3 and sorted(places) == list(range(15))


@pytest.mark.parametrize(
    ("tokens", "inputs", "match"),
    [
        ([5, 6], {"target_tokens": [1]}, r"\[1\]"),
        ([], {"target_tokens": []}, "0 tokens"),
        ([5, 6, 7, 8], {"target_tokens": [1, 2, 3, 4]}, "1 to 3"),
        ([5, 10], {"target_tokens": [1, 2]}, "model_input"),
        ([5, 6], {"target_tokens": [1, -1]}, "target_tokens"),
        ([5, 6], {"target_tokens": [1, 2], "weights": [1]}, "weights"),
    ],
)
def test_what_does_not_fit(tokens: list[int], inputs: dict[str, list[int]], match: str) -> None:
    values = {name: np.array(each, np.int64) for name, each in inputs.items()}
    with pytest.raises(UserError, match=f"datum 0.*{match}"):
        Datums([Datum(tokens, values)]).check(vocabulary=10, context=3)
