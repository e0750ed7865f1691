"""Runs whose engine samples with rounded weights (``system.engine_weights``), by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.cli.main import app
from tunesmith.models.cpu.products import compiled
from tunesmith.records.metrics import read_metrics

pytestmark = pytest.mark.skipif(not compiled(), reason="there is no C++ compiler")


def invoked(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("weights", "rank"), [("model", 0), ("float16", 0), ("int8", 0), ("int8", 4)]
)
def test_a_run_learns_from_samples_of_rounded_weights(
    tmp_path: Path, weights: str, rank: int
) -> None:
    """The loss starts at a ratio of 1: but for the rounding of float16, and since int8 is
    corrected. The canary sees how far int8 is from what is trained, at every version."""
    model = save_model(tmp_path / "model")
    settings: dict[str, Any] = {
        "system__engine_weights": weights,
        "system__engine_process": weights == "int8",
    }
    settings |= {"lora__rank": rank} if rank else {}
    (tmp_path / "run.toml").write_text("")
    invoked("rl", str(tmp_path / "run.toml"), *rl_settings(tmp_path, model, **settings))
    run = tmp_path / "run"
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "grad_norm" in line]
    assert len(steps) == 3
    for line in steps:
        assert line["ratio"] == pytest.approx(1, abs=1e-4 if weights == "float16" else 1e-6)
        if weights == "int8":
            assert 1e-5 < line["canary"] < 0.1
    said: dict[str, Any] = json.loads((run / "resolved.json").read_text())["settings"]
    correction = "token_truncate" if weights == "int8" else "none"
    assert said["algorithm.correction"]["value"] == correction
