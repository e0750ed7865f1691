"""A run whose reward hangs in C, ends its process and is killed, once each: it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

HOSTILE = """
import os, re, signal
CALLS = []

def share(completions, **columns):
    CALLS.append(1)
    if not os.path.exists("hung"):
        open("hung", "w").close()
        re.match(r"(a+)+$", "a" * 60 + "b")
    if len(CALLS) == 3 and not os.path.exists("gone"):
        open("gone", "w").close()
        os._exit(0)
    if len(CALLS) == 5 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(c) % 3) for c in completions]
"""


def test_a_run_outlives_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = rl_settings(tmp_path, save_model(tmp_path / "model"), train__steps=4)
    (tmp_path / "rewards.py").write_text(HOSTILE)
    changed = ["reward.isolation=process", "reward.timeout=6", "reward.max_failed_share=0.6"]
    outcome = assembly.run_rl(
        None, [s for s in settings if not s.startswith("reward.isolation")] + changed
    )
    lines: list[dict[str, Any]] = [
        line for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "loss" in line
    ]
    assert len(lines) == 4 and all(
        (tmp_path / name).exists() for name in ("hung", "gone", "killed")
    )
    failed = sum(line["rollouts/failed"] * line["rollouts"] for line in lines)
    assert failed == 8, (
        "two groups of four: the one that hung and the one that left; the killed one was asked "
        "again"
    )
