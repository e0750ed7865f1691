from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.micro import random_batch
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.learn.algorithms.corrections import Correction, NoCorrection, correction_weights
from tunesmith.learn.algorithms.objective import prepare_columns
from tunesmith.plan.derive.algorithm import resolve_algorithm

NAMES = sorted(Correction.types.keys() - {"none"})
WEIGHTS = [0.25, 1.0, 4.0, 1.5]  # product 1.5, geometric mean 1.5^(1/4) = 1.107


def made(name: str, low: float = 0.5, high: float = 2.0) -> Correction:
    kind = Correction.types[name]
    return kind(
        **{key: value for key, value in (("low", low), ("high", high)) if key in kind.model_fields}
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_truncate", [0.25, 1.0, 2.0, 1.5]),
        ("token_clamp", [0.5, 1.0, 2.0, 1.5]),
        ("icepop", [0.0, 1.0, 0.0, 1.5]),
        ("sequence_truncate", [1.5] * 4),
        ("sequence_mask", [0.5, 1.0, 2.0, 1.5]),
        ("geometric", [1.0] * 4),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    sampler = np.full(4, -1.0)
    found = correction_weights(made(name), sampler + np.log(WEIGHTS), sampler)
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["geometric", "sequence_mask"])
def test_a_sequence_whose_mean_is_outside_is_rejected_whole(name: str) -> None:
    for low, high in ((1.2, 4.0), (0.1, 1.1)):
        found = correction_weights(made(name, low, high), np.log(WEIGHTS), np.zeros(4))
        assert found.tolist() == [0.0] * 4


def test_sequence_truncation_bounds_the_product() -> None:
    found = correction_weights(made("sequence_truncate"), np.full(3, 0.5), np.zeros(3))
    assert found.tolist() == [2.0] * 3


@pytest.mark.parametrize("name", NAMES)
def test_equal_policies_weigh_one(name: str) -> None:
    found = correction_weights(Correction.types[name](), np.full(3, -1.0), np.full(3, -1.0))
    assert found.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_has_no_part_in_its_sequence(name: str, bad: float) -> None:
    old = np.array([-1.0, bad, -0.9])
    sampler = np.array([-1.0, -1.0, -1.0])
    found = correction_weights(made(name), old, sampler)
    clean = correction_weights(made(name), old[[0, 2]], sampler[[0, 2]])
    assert math.isnan(found[1])
    assert found[[0, 2]].tolist() == clean.tolist()
    assert np.isnan(correction_weights(made(name), np.array([bad]), np.zeros(1))).all()
    assert correction_weights(made(name), np.zeros(0), np.zeros(0)).size == 0


@pytest.mark.parametrize("name", NAMES)
def test_huge_differences_stay_finite(name: str) -> None:
    found = correction_weights(made(name), np.array([0.0, -2000.0]), np.array([-2000.0, 0.0]))
    assert np.isfinite(found).all()


def test_the_column_is_made_where_a_correction_is_set() -> None:
    section, _ = resolve_algorithm(
        AlgorithmSection.model_validate({"correction": "token_clamp"}), max_new_tokens=8
    )
    batch = random_batch(0)
    prepare_columns(batch, section, seed=0)
    old = batch.columns["old_logprobs"]
    sampler = batch.columns["behaviour_logprobs"]
    assert batch.columns["correction"] == pytest.approx(np.exp(old - sampler).clip(0.5, 2.0))
    assert NoCorrection()(np.zeros(2)).tolist() == [1.0, 1.0]
    plain, _ = resolve_algorithm(AlgorithmSection(), max_new_tokens=8)
    untouched = random_batch(0)
    prepare_columns(untouched, plain, seed=0)
    assert untouched.columns.keys() == random_batch(0).columns.keys()
