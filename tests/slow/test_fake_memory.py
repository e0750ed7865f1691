"""Planned memory against what the product's own steps need on a GPU that is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from benchmarks.device_memory import CASES, compared  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", [case for case in CASES if case.layers <= 4], ids=lambda case: case.name)
def test_the_plan_is_within_five_percent(tmp_path: Path, case: Any) -> None:
    row = compared(tmp_path, case)
    assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row
