"""``tunesmith runs`` reads directories of runs, whole or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import write_lines
from tunesmith.cli.main import app
from tunesmith.errors import ConfigError
from tunesmith.records.runs import differences, find_runs, late_means, read_run


def make_run(path: Path, steps: int, *, of: int = 10, reward: float = 0.0, **settings: Any) -> Path:
    path.mkdir(parents=True)
    values = {"train.steps": of, "model.path": "models/tiny", "algorithm.name": "grpo", **settings}
    entries = {key: {"value": value, "source": "default"} for key, value in values.items()}
    (path / "resolved.json").write_text(json.dumps({"settings": entries}))
    lines = [
        {"step": n, "time": 100.0 + n, "reward": reward + n, "seconds": 2.0}
        for n in range(1, steps + 1)
    ]
    write_lines(
        path / "metrics.jsonl",
        [*lines, {"step": steps, "time": 200.0, "eval/reward": reward + 0.5}],
    )
    return path


def show(*words: object) -> str:
    done = CliRunner().invoke(app, ["runs", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_list_has_the_newest_first_and_says_how_far_each_came(tmp_path: Path) -> None:
    make_run(tmp_path / "old", 10)
    make_run(tmp_path / "new", 4)
    for number, name in enumerate(("old", "new")):
        os.utime(tmp_path / name / "metrics.jsonl", (1000 + number, 1000 + number))
    (tmp_path / "latest").symlink_to("new")
    (tmp_path / "no-run").mkdir()
    assert [(run.path.name, run.state, run.step) for run in find_runs(tmp_path)] == [
        ("new", "stopped", 4),
        ("old", "done", 10),
    ]
    header, first, second = (line.split() for line in show("list", tmp_path).splitlines())
    assert header == ["run", "state", "step", "of", "model", "algorithm", "result"]
    assert first == ["new", "stopped", "4", "10", "tiny", "grpo", "reward", "4"]
    assert second[:3] == ["old", "done", "10"]
    assert [run["step"] for run in json.loads(show("list", tmp_path, "--json"))] == [4, 10]


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 10, **{"train.lr": 1e-6})
    b = make_run(tmp_path / "b", 10, reward=5, **{"lora.rank": 8})
    assert differences([read_run(a), read_run(b)]) == {
        "train.lr": [1e-6, None],
        "lora.rank": [None, 8],
    }
    assert late_means(a) == {"reward": 9.5, "seconds": 2.0, "eval/reward": 0.5}  # steps 9 and 10
    compared = json.loads(show("compare", a, b, "--json"))
    assert compared["metrics"]["reward"] == [9.5, 14.5]
    lines = [line.split() for line in show("compare", a, b).splitlines()]
    assert ["train.lr", "1e-06", "none"] in lines
    assert ["eval/reward", "0.5", "5.5"] in lines


def test_the_tail_has_the_last_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    assert show("tail", run, "-n", 2).splitlines() == [
        "step 10: reward 10",
        "step 10: eval/reward 0.5",
    ]
    assert len(show("tail", run, "--follow").splitlines()) == 10  # nobody writes it


def test_a_followed_run_whose_clock_is_set_back_shows_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 3)
    polls = iter([True, True, False])
    monkeypatch.setattr("tunesmith.records.run_dir.is_running", lambda _: next(polls))
    written = iter([4, 5])

    def write_next(_: float) -> None:
        step = next(written)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 10.0 + step, "reward": step}) + "\n")

    monkeypatch.setattr("tunesmith.cli.runs.time.sleep", write_next)
    lines = show("tail", run, "--follow", "-n", 2).splitlines()
    assert lines == [
        "step 3: reward 3",
        "step 3: eval/reward 0.5",
        "step 4: reward 4",
        "step 5: reward 5",
    ]


def test_half_written_and_foreign_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    (run / "resolved.json").write_text('{"settings": [1, 2]}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"reward": 1}\n{"step": 4, "rew')
    assert read_run(run).step == 3
    assert show("list", tmp_path).splitlines()[1].split()[:3] == ["run", "stopped", "3"]


@pytest.mark.parametrize(
    "words", [["list", "empty"], ["tail", "empty"], ["compare", "empty"], ["tail", "a", "b"]]
)
def test_what_is_no_run_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["runs", *words])
    assert done.exit_code == 2
    with pytest.raises(ConfigError):
        read_run(tmp_path / "empty")
