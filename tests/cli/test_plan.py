"""The command ``plan`` ends in a plan or in a refusal, for every kind of run, cluster and model."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.clusters import SIZES, cases
from tests.support.documents import ROOT
from tests.support.hub_of_sizes import serve
from tests.support.machine_facts import CPU
from tests.support.planned_runs import PPO, RL, RUNS, SIZED, UNKNOWN
from tunesmith.cli.main import app
from tunesmith.config.commands import KINDS
from tunesmith.config.load import find_kind
from tunesmith.errors import LESS_MEMORY

CLUSTERS: dict[str, list[str]] = {
    "none": [],
    "ray": ["system.cluster=ray"],
    "several ranks": ["system.trainer_ranks=8"],
}
MACHINES = ("this", "H200", "8xH100-80GB", "2x8xA100-80GB", "8xT4-16GB")


@pytest.fixture(autouse=True)
def hub_of_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in the run file's folder, where the models would be directories of the run's own.
    serve({**SIZES, UNKNOWN: {}}, tmp_path / "hub", monkeypatch)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine than the one that tests: it has as many cores, and as much free memory, at
    all times."""
    machine = replace(CPU, cores=16)
    monkeypatch.setattr("tunesmith.run.assembly.checking.read_hardware", lambda: machine)


def planned(*said: str) -> tuple[int, str]:
    """The exit code and JSON output of the command, which prints the same as text; a traceback
    fails."""
    codes: set[int] = set()
    output = ""
    for option in ((), ("--json",)):
        done = CliRunner().invoke(app, ["plan", *said, *option])
        assert isinstance(done.exception, SystemExit | None), done.exc_info
        assert done.exit_code in (0, 2, 3), done.output
        codes.add(done.exit_code)
        output = done.stdout
    [code] = codes
    if code != 2:
        assert json.loads(output)["fits"] is (code == 0)
    return code, output


def test_every_command_is_tried() -> None:
    assert RUNS.keys() == KINDS.keys()
    for command, runs in RUNS.items():
        for said in runs:
            assert find_kind(None, ["model.path=org/m", *said]).command == command


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("command", RUNS)
def test_every_run_is_planned_or_refused(
    command: str, cluster: str, on: str, tmp_path: Path
) -> None:
    """Also with a model whose size is not known; what is refused there are settings, never
    memory."""
    (tmp_path / "run.toml").touch()
    codes: set[int] = set()
    for model in (SIZED, UNKNOWN):
        for said in RUNS[command]:
            overrides = [f"model.path={model}", "data.train=org/d", *said, *CLUSTERS[cluster]]
            code, output = planned(str(tmp_path / "run.toml"), *overrides, "--on", on)
            codes.add(code)
            assert model == SIZED or code != 3, output
    assert cluster != "none" or 0 in codes


@pytest.mark.parametrize("size", [pytest.param("known", marks=pytest.mark.slow), "unknown"])
@pytest.mark.parametrize(
    "command", [command for command, expected in cases() if "does not" not in "".join(expected)]
)
def test_every_recipe_is_planned(command: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    unknown = [f"model.path={UNKNOWN}"] if size == "unknown" else []
    assert planned(*shlex.split(command), *unknown)[0] == 0


@pytest.mark.slow
def test_a_run_on_ray_with_a_critic_has_other_layouts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    said = [f"model.path={SIZED}", "data.train=org/d", *PPO, "system.cluster=ray"]
    code, output = planned(str(tmp_path / "run.toml"), *said, "--on", "2x8xA100-80GB")
    others = json.loads(output)["next_best"]
    assert code == 0 and others and all({} not in each["layout"].values() for each in others)


@pytest.mark.slow
def test_a_small_run_on_ray_is_planned(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    said = [
        f"model.path={SIZED}",
        "data.train=org/d",
        *RL,
        "system.cluster=ray",
        "system.trainer_ranks=2",
    ]
    assert planned(str(tmp_path / "run.toml"), *said, "lora.rank=16", "--on", "4xH100-80GB")[0] == 0


def test_the_list_of_what_takes_less_memory_is_the_documents() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = text[text.index("## It runs out of memory") :]
    rows = re.findall(r"^\d+\. (.*)$", section[: section.index("\n## ", 1)], re.MULTILINE)
    keys = [
        set(re.findall(r"(?:system|lora|model|rollout|data)\.[\w.]*\w", said))
        for said in LESS_MEMORY
    ]
    assert len(rows) == len(keys)
    for row, named in zip(rows, keys, strict=True):
        assert all(f"`{key}" in row for key in named), row


@pytest.mark.parametrize(
    ("said", "code"),
    [("kto.beta=0.1", 0), ("dpo.beta=0.1", 2), ("rm.loss=sigmoid", 2)],
)
def test_a_micro_batch_holds_both_sequences_of_a_pair(said: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    lengths = ["data.max_tokens=4096", "system.max_tokens_per_microbatch=6000", "lora.rank=16"]
    run = [str(tmp_path / "run.toml"), f"model.path={SIZED}", "data.train=org/d", said, *lengths]
    assert planned(*run, "--on", "H100-80GB")[0] == code


@pytest.mark.parametrize(
    ("said", "key"),
    [
        (["lora.rank=16", "data.max_tokens=512"], "data.max_tokens"),
        pytest.param(
            [*RL, "lora.rank=16", "system.engine=local"],
            "rollout.max_new_tokens",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_longest_sequences_are_planned(said: list[str], key: str, tmp_path: Path) -> None:
    """Whatever length the run has otherwise, and beyond the model's context."""
    (tmp_path / "run.toml").touch()
    run = [str(tmp_path / "run.toml"), f"model.path={SIZED}", "data.train=org/d", *said]
    code, output = planned(*run, "--on", "H100-80GB", "--max-context")
    report = json.loads(output)
    assert code == 0 and report["longest"] > 131_072
    [device] = report["memory"]
    assert 0.9 < device["share"] <= 0.95
    assert report["layout"]["system.offload_activations"]["value"] is True
    assert any("131072" in note for note in report["notes"])
    text = CliRunner().invoke(app, ["plan", *run, "--on", "H100-80GB", "--max-context"]).stdout
    assert f"{report['longest']:,}" in text.splitlines()[0] and key not in text


def test_the_longest_sequences_are_those_of_runs_that_train_and_fit(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    run = [str(tmp_path / "run.toml"), "data.train=org/d", "--max-context", "--on", "T4-16GB"]
    assert planned(*run, f"model.path={SIZED}")[0] == 3
    assert planned(*run, f"model.path={UNKNOWN}", "lora.rank=16")[0] == 2
    sampled = planned(*run, f"model.path={SIZED}", "output.kind=completions")
    assert sampled[0] == 2
