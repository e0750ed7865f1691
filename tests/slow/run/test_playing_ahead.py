"""Whole runs that play ahead with an engine in another process, and runs whose engine and trainer
take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

RUNS: dict[str, dict[str, Any]] = {
    "one behind": {"system__engine_process": True, "rollout__max_staleness": 1},
    "under way": {
        "system__engine_process": True, "rollout__max_staleness": 2, "rollout__partial": True,
        "rollout__over_generation": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_play_ahead(name: str, tmp_path: Path) -> None:
    """All steps are taken with full batches, no token is too old, and the correction is on."""
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(5, 6))
    settings = RUNS[name] | {"train__steps": 5, "data__eval": str(held_out), "eval__every": 2}
    outcome = assembly.run_rl(
        None, rl_settings(tmp_path, save_model(tmp_path / "model"), "run", **settings)
    )
    lines = [
        line
        for line in read_metrics(outcome.run_dir / "metrics.jsonl")
        if "optimizer_steps" in line
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    oldest = [line["staleness/max"] for line in lines]
    assert max(oldest) <= settings["rollout__max_staleness"]
    assert max(oldest) > 0
    resolved = (outcome.run_dir / "config.toml").read_text()
    assert 'correction = "token_truncate"' in resolved and "decoupled = true" in resolved


def test_taking_turns_on_a_device_changes_nothing(tmp_path: Path) -> None:
    """The engine's memory is given back before every training step; the curve is the same."""
    model = save_model(tmp_path / "model")
    changed = {"system__engine_process": True}
    plain = assembly.run_rl(None, rl_settings(tmp_path, model, "plain", **changed))
    turns = assembly.run_rl(
        None, rl_settings(tmp_path, model, "turns", system__hybrid=True, **changed)
    )
    losses = [
        [line["loss"] for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "loss" in line]
        for outcome in (plain, turns)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 3


AGENT = """
async def answer(client, prompt):
    await client.chat.completions.create(messages=[{"role": "user", "content": prompt}])
"""


@pytest.mark.parametrize("partial", [False, True])
def test_an_evaluation_has_turns_of_its_own(tmp_path: Path, partial: bool) -> None:
    """Where one episode is played at a time, and the one in progress is held."""
    (tmp_path / "agent.py").write_text(AGENT)
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(3, 6))
    changed = {
        "system__engine_process": True,
        "rollout__max_staleness": 1,
        "rollout__partial": partial,
        "environment__path": str(tmp_path / "agent.py") + ":answer",
        "environment__concurrency": 1,
        "data__chat": True,
        "data__eval": str(held_out),
        "eval__every": 1,
        "train__steps": 3,
    }
    outcome = assembly.run_rl(
        None, rl_settings(tmp_path, save_model(tmp_path / "model"), **changed)
    )
    assert len(outcome.evaluations) == 4
