"""The run file of examples/code_tests: every form of tests, in the sandbox that it names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tests.support.tiny import save_model
from tunesmith.learn.usercode.jail import missing
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "it can")


def test_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "code_tests"
    shutil.copytree(ROOT / "examples" / "code_tests", here)
    save_model(here / "model", max_position_embeddings=1024)
    monkeypatch.chdir(here)
    small = ["rollout.max_new_tokens=8", "train.steps=1", "rollout.prompts_per_step=3"]
    assembly.run_rl(here / "rl.toml", [*small, "rollout.group_size=2"])
    (line,) = read_metrics(here / "runs" / "rl" / "metrics.jsonl")
    assert line["reward/code_tests/applied"] == 1.0 and line["rollouts/failed"] == 0.0
    assert line["logged/tests_passed"] == line["reward/code_tests/mean"] < 1.0
    assert len(json.loads((here / "runs" / "rl" / "rollouts.jsonl").read_text().splitlines()[0]))
