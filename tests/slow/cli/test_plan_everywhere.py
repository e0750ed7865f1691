"""``tunesmith plan``, for every recipe, preset, command and named machine: a plan within the limits,
or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.clusters import FILES, SIZES
from tests.support.documents import ROOT
from tests.support.hub_of_sizes import serve
from tests.support.planned_runs import RUNS, SIZED
from tunesmith.cli.main import app
from tunesmith.config.presets import PRESETS
from tunesmith.plan.cost.memory import LIMIT, LIMIT_OF_SEVERAL
from tunesmith.plan.facts.machines import gpu_kinds

SMALL = "meta-llama/Llama-3.2-1B-Instruct"
KINDS = [*gpu_kinds()]
CLUSTERS = [f"{count}{gpu}" for gpu in KINDS for count in ("", "8x", "2x8x")]
SHORT = ("H100-80GB", "8xH100-80GB", "8xT4-16GB", "2x8xA100-80GB")
"""Those with which the recipes are planned unless all are asked for."""
DIFFERENT = (
    "B200-180GB", "H200-141GB", "H100-80GB", "A100-40GB", "V100-16GB", "L40S-48GB", "L4-24GB",
    "T4-16GB", "RTX5090-32GB", "RTX4090-24GB", "RTX4070-12GB", "RTX4060-8GB",
)  # fmt: skip
"""A GPU of each size and generation, for which each command is planned unless all are asked for."""
TRAINING = ("sft", "rm", "dpo", "kto", "rft", "rl")


@pytest.fixture(autouse=True)
def hub_of_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(SIZES, tmp_path / "hub", monkeypatch)


def check(*said: str) -> int:
    """The exit code of a plan within the limits, or of a refusal in words."""
    done = CliRunner().invoke(app, ["plan", *said, "--json"])
    assert isinstance(done.exception, SystemExit | None), done.exc_info
    if done.exit_code != 0:
        assert done.exit_code in (2, 3), done.output
        reason = done.stderr.removeprefix("error: ").strip()
        assert len(reason) > 20 and "internal" not in reason, reason
        return done.exit_code
    report = json.loads(done.stdout)
    ranks = report["layout"].get("system.trainer_ranks", {"value": 1})["value"]
    limit = LIMIT_OF_SEVERAL if ranks > 1 else LIMIT
    assert report["memory"] and all(each["share"] <= limit for each in report["memory"])
    assert report["seconds"].get("step", 1) > 0
    return 0


@pytest.mark.parametrize(
    "on", [pytest.param(on, marks=[pytest.mark.long] * (on not in SHORT)) for on in CLUSTERS]
)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_planned_or_refused(
    file: Path, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    check(str(file.relative_to(ROOT)), "--on", on)


@pytest.mark.parametrize("command", TRAINING)
@pytest.mark.parametrize(
    "on", [pytest.param(on, marks=[pytest.mark.long] * (on not in DIFFERENT)) for on in KINDS]
)
def test_a_command_is_planned_or_refused(command: str, on: str, tmp_path: Path) -> None:
    """A model of 1B fits each of these GPUs, if need be with its optimizer in host memory."""
    (tmp_path / "run.toml").touch()
    run = [str(tmp_path / "run.toml"), f"model.path={SMALL}", "data.train=org/d"]
    assert check(*run, *RUNS[command][0], "--on", on) == 0
    assert check(*run, *RUNS[command][0], "lora.rank=16", "--on", on) == 0


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "distill"])
@pytest.mark.parametrize("on", ["H100-80GB", "8xH100-80GB"])
def test_a_preset_is_planned(preset: str, on: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    said = [f"model.path={SIZED}", "data.train=org/d", 'reward.functions=["math"]']
    run = [str(tmp_path / "run.toml"), *said, f"algorithm.name={preset}", "lora.rank=16"]
    assert check(*run, "--on", on) == 0
