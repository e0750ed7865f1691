"""Where the time of steps goes: by hand, and of a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings
from tunesmith.cli.main import app
from tunesmith.errors import ConfigError
from tunesmith.guide.tune.steps import measure_steps, measured

STEP = {
    "seconds": 11.0,
    "seconds/rollout": 6.0,
    "seconds/train": 3.0,
    "seconds/sync": 1.0,
    "seconds/eval": 1.0,
    "sampled_tokens": 600.0,
    "trained_tokens": 900.0,
    "attainable_seconds": 1.8,
    "attainable_seconds/train": 0.6,
}


def test_phases_have_their_shares_and_limits() -> None:
    slow = {**STEP, "seconds/rollout": 60.0}
    found = measured([STEP, slow, STEP], overlapping=False, costs=[("mm", 1.5)])
    assert (found.steps, found.seconds, found.limit_share) == (3, 10.0, 0.18)
    assert [(p.name, p.seconds, p.share) for p in found.phases] == [
        ("rollout", 6.0, 0.6),
        ("train", 3.0, 0.3),
        ("sync", 1.0, 0.1),
    ]
    rollout, train, sync = found.phases
    assert (rollout.tokens_per_second, train.tokens_per_second, sync.tokens_per_second) == (
        100.0,
        300.0,
        None,
    )
    assert rollout.limit_share == pytest.approx(0.2) and train.limit_share == pytest.approx(0.2)
    assert sync.limit_share is None


def test_what_goes_on_at_the_same_time_has_no_limit_of_its_own() -> None:
    found = measured([STEP], overlapping=True)
    assert [p.limit_share for p in found.phases] == [None] * 3 and found.limit_share == 0.18


def test_training_on_data_is_all_there_is() -> None:
    found = measured(
        [{"seconds/train": 2.0, "attainable_seconds": 0.5, "trained_tokens": 10.0}],
        overlapping=False,
    )
    assert [(p.name, p.limit_share, p.tokens_per_second) for p in found.phases] == [
        ("train", 0.25, 5.0)
    ]


def test_scoring_is_told_apart_from_the_phase_that_it_is_in() -> None:
    scored = {
        **STEP,
        "scoring_seconds": 1.0,
        "attainable_seconds/scoring": 0.3,
        "attainable_seconds": 2.1,
    }
    found = {p.name: p for p in measured([scored], overlapping=False).phases}
    assert (found["train"].seconds, found["scoring"].seconds) == (2.0, 1.0)
    limits = {name: phase.limit_share for name, phase in found.items()}
    assert limits == pytest.approx({"rollout": 0.2, "train": 0.3, "scoring": 0.3, "sync": None})
    told = measured(
        [{"seconds/train": 2.0, "attainable_seconds": 0.5, "scoring_seconds": 1.0}],
        overlapping=False,
    )
    assert {p.name: p.seconds for p in told.phases} == {"train": 1.0, "scoring": 1.0}


def test_unknown_limits_are_left_out() -> None:
    found = measured(
        [{"seconds/rollout": 2.0, "seconds/train": 2.0, "attainable_seconds/train": 1.0}],
        overlapping=False,
    )
    assert {p.name: p.limit_share for p in found.phases} == {"rollout": None, "train": 0.5}
    assert found.limit_share is None


def test_a_run_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'model.path = "{save_model(tmp_path / "model")}"\ndata.train = "train.jsonl"\n'
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ConfigError, match=r"tunesmith bench is for runs that train"):
        measure_steps(tmp_path / "run.toml", ["output.kind=best", "reward.functions=['math']"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_the_command_measures_a_run(kind: str, tmp_path: Path) -> None:
    make = rl_settings if kind == "rl" else sft_settings
    settings = make(tmp_path, save_model(tmp_path / "model"))
    (tmp_path / "run.toml").write_text("")
    done = CliRunner().invoke(
        app, ["bench", str(tmp_path / "run.toml"), *settings, "--steps", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["steps"] == 2 and found["seconds"] > 0 and len(found["costs"]) == 3
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert phases["train"]["tokens_per_second"] > 0 and ("rollout" in phases) == (kind == "rl")
    assert sum(phase["share"] for phase in found["phases"]) == pytest.approx(1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "nothing is kept"
