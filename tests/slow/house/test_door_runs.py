"""Runs without the rooms that the trainer finds by doors, to the end."""

from __future__ import annotations

from pathlib import Path

from tests.support.hidden_rooms import without_rooms
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings


def test_runs_end_without_the_rooms_behind_doors(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    settings = {
        "rl": rl_settings(tmp_path, model, train__steps=1),
        "sft": sft_settings(tmp_path, model, train__steps=1),
    }
    for name, lines in settings.items():
        (tmp_path / f"{name}.toml").write_text("\n".join(lines))
    outcomes = without_rooms(tmp_path, ["plan", "rl.toml"], ["sft", "sft.toml"], ["rl", "rl.toml"])
    assert [code for code, _ in outcomes] == ["0", "0", "0"], outcomes
    for run in ("sft", "run"):
        assert (tmp_path / run / "checkpoints" / "step-000001" / "model").is_dir()
