"""Episodes teach: the examples as a person runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tests.support.example_runs import mean, metrics, python, tunesmith
from tests.support.long import again


def example(name: str, folder: Path) -> Path:
    """A copy of an example after its warm start."""
    here = folder / name
    shutil.copytree(
        ROOT / "examples" / name, here, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl")
    )
    python(here, "prepare.py")
    tunesmith(here, "sft", "sft.toml")
    return here


@pytest.mark.long
def test_number_guessing_learns_over_turns(tmp_path: Path) -> None:
    here = example("number_guessing", tmp_path)
    run = here / "runs" / "rl"
    tunesmith(here, "rl", "rl.toml", "eval.every=40")
    reward = metrics(run, "reward")
    assert mean(reward[-4:]) - mean(reward[:2]) > 0.15, reward
    before, after = metrics(run, "eval/pass@1")
    assert after - before > 0.1, (
        "the share of 640 drawn games won without a guess that was ruled out"
    )
    shown = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert all(line["status"] == "ok" for line in shown)


@pytest.mark.parametrize(
    ("name", "steps", "rise"), [again("grid_walk", 20, 0.25), again("calculator", 20, 0.1)]
)
def test_an_example_with_an_environment_learns(
    name: str, steps: int, rise: float, tmp_path: Path
) -> None:
    here = example(name, tmp_path)
    tunesmith(here, "rl", "rl.toml", f"train.steps={steps}", f"eval.every={steps}")
    reward = metrics(here / "runs" / "rl", "reward")
    assert mean(reward[-4:]) - mean(reward[:2]) > rise, reward
