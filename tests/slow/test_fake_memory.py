"""Planned memory against what the product's own steps need on a GPU that is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fake_runs import resolved
from tunesmith.errors import CapacityError

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from benchmarks.device_memory import CASES, DEEP, LARGE, RANKED, compared, extrapolated  # noqa: E402

pytestmark = pytest.mark.slow
SOME = [*(case for case in CASES if case.layers <= 4), *RANKED[3:24:9], *RANKED[24:27], *RANKED[-3:]]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_the_plan_is_within_five_percent(tmp_path: Path, case: Any) -> None:
    row = compared(tmp_path, case)
    assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row


@pytest.mark.parametrize("case", DEEP, ids=lambda case: case.name)
def test_a_large_model_resolves_fits_and_takes_steps(tmp_path: Path, case: Any) -> None:
    """Two depths tell what a layer takes, and so what all take."""
    row = extrapolated(tmp_path, case)
    assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row
    assert max(row["measured"], row["planned"]) < row["free"]


def test_70b_on_one_small_gpu_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs at least 1\.\d+TB .* and 23\.\dGB are free"):
        resolved(tmp_path, "sft", LARGE | {"num_hidden_layers": 80}, "A10G-24GB", "data.max_tokens=2048")
