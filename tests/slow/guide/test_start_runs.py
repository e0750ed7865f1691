"""What ``tunesmith init`` writes runs as it is, with the tiny model that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunesmith.cli.main import app
from tunesmith.guide.recipes.start import STARTS

SHORTER = {
    "rl": ["train.steps=2", "rollout.max_new_tokens=8"],
    "agent": ["train.steps=1", "rollout.max_new_tokens=8", "rollout.prompts_per_step=2"],
    "sft": ["train.epochs=0.2"],
    "rm": ["train.epochs=0.2"],
    "dpo": ["train.epochs=0.2"],
    "kto": ["train.epochs=0.2"],
    "distill": ["train.steps=1", "rollout.max_new_tokens=8", "rollout.prompts_per_step=2"],
}


def tunesmith(*arguments: str) -> None:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("task", SHORTER)
def test_a_start_runs(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tunesmith("init", task, "new", "--tiny-model")
    tunesmith(
        STARTS[task].command, "new/run.toml", "run_dir=done", "system.threads=1", *SHORTER[task]
    )
    assert list(tmp_path.glob("done/checkpoints/*/model/model.safetensors"))


def test_rft_says_that_an_untrained_model_is_never_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tunesmith("init", "rft", "new", "--tiny-model")
    short = ["system.threads=1", "sampling.max_new_tokens=4", "sampling.n=1", "run_dir=done"]
    done = CliRunner().invoke(app, ["rft", "run", "new/run.toml", *short])
    assert done.exit_code in (1, 2) and (tmp_path / "done" / "base" / "evaluation.json").exists()
