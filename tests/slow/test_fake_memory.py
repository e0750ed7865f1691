"""Planned memory against what the product's own steps need on a GPU that is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fake_runs import planned_and_measured, resolved
from tunesmith.errors import CapacityError
from tunesmith.plan.memory import planned_devices

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from benchmarks.device_memory import CASES, LARGE, QWEN2, RANKED, compared  # noqa: E402

pytestmark = pytest.mark.slow
SOME = [*(case for case in CASES if case.layers <= 4), *RANKED[3::9], *RANKED[-3:]]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_the_plan_is_within_five_percent(tmp_path: Path, case: Any) -> None:
    row = compared(tmp_path, case)
    assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row


@pytest.mark.parametrize(("shape", "layers", "spec"), [(QWEN2, 28, "8xH100-80GB")])
def test_a_large_model_resolves_fits_and_takes_steps(
    tmp_path: Path, shape: dict[str, Any], layers: int, spec: str
) -> None:
    """Two depths tell what a layer takes, and so what all take."""
    given = ("data.max_tokens=4096", "system.max_tokens_per_microbatch=4096", "system.gradient_checkpointing=true")
    given = (*given, "system.zero_stage=3", "train.batch_size=128")
    config, facts = resolved(tmp_path, "sft", shape | {"num_hidden_layers": layers}, spec, *given)
    [(_, planned, free)] = planned_devices(config, facts)
    assert planned.peak < free and config.system.trainer_ranks == 8
    given = (*given, f"system.shard_size={config.system.shard_size}")
    few, more = (
        planned_and_measured(tmp_path, "sft", shape | {"num_hidden_layers": n}, spec, *given)[1]["train"].total
        for n in (2, 4)
    )
    measured = few + (more - few) / 2 * (layers - 2)
    assert measured == pytest.approx(planned.training - planned.libraries, rel=0.05)


def test_70b_on_one_small_gpu_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs at least 1\.\d+TB .* and 23\.\dGB are free"):
        resolved(tmp_path, "sft", LARGE | {"num_hidden_layers": 80}, "A10G-24GB", "data.max_tokens=2048")
