"""Each engine in a process of its own has its own lane and its own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tests.support.traces import check_trace
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly


def test_two_engines_have_two_lanes(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    changed = {
        "system__engine_process": True,
        "system__engines": 2,
        "monitor__trace_steps": [2],
        "train__steps": 2,
    }
    run = assembly.run_rl(None, rl_settings(tmp_path, model, "run", **changed)).run_dir
    lanes = check_trace(
        json.loads((run / "trace" / "step-000002.json").read_text(encoding="utf-8"))
    )
    assert {"engine 0", "engine 1"} < lanes.keys()
    for line in read_metrics(run / "metrics.jsonl"):
        shares = [line[f"idle/engine/{number}"] for number in (0, 1)]
        assert line["idle/engine"] == pytest.approx(sum(shares) / 2) and all(
            0 < s < 1 for s in shares
        )
        assert line["engines"] == 2 and line["weight_age"] == 0
        for name in ("engine_running", "engine_waiting", "kv_used"):
            assert line[f"{name}/min"] <= line[f"{name}/0"] <= line[f"{name}/max"]
        assert line["engine_running/min"] >= 1
        assert line["engine_tokens_per_second/0"] > 0 and line["engine_tokens_per_second/1"] > 0
