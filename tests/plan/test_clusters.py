"""The run files for clusters resolve, fit the machines that their comments name, and are laid out
as these say."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.clusters import FILES, SIZES, cases
from tests.support.documents import ROOT
from tests.support.hub_of_sizes import serve
from tunesmith.config.changing import with_values
from tunesmith.config.load import find_kind, load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.guide.simulate.dry_run import dry_run
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.resolve import resolve
from tunesmith.records.toml import toml_value
from tunesmith.run.assembly.planning import plan_run


@pytest.fixture(autouse=True)
def hub_of_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has the configurations of the models, and nothing else."""
    serve(SIZES, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"), cases(), ids=lambda case: case if isinstance(case, str) else ""
)
def test_a_recipe_fits_its_machine(
    command: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file, option, machine, *said = shlex.split(command)
    assert option == "--on"
    config = load_config(find_kind(Path(file), said), Path(file), said)
    if expected == ["does not fit"]:
        with pytest.raises(CapacityError, match=r"needs at least 1\.\d+TB .*free"):
            plan_run(config, machine)
        return
    resolved = plan_run(config, machine)
    values = resolved.settings
    for line in expected:
        key, _, value = line.partition(" = ")
        assert toml_value(values[key]) == value, line
    devices = planned_devices(resolved)
    assert devices
    for name, planned, free in devices:
        assert planned.peak <= free, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command, marks=[pytest.mark.long] * (" --on 2x" in command or " --on 6x" in command)
        )
        for command, expected in cases()
        if "does not" not in "".join(expected)
    ],
)
def test_a_recipe_takes_steps_on_its_machine(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the layout of the whole model, and two of its layers."""
    monkeypatch.chdir(ROOT)
    file, _, machine, *said = shlex.split(command)
    resolved = plan_run(load_config(find_kind(Path(file), said), Path(file), said), machine)
    said_here = resolved.said
    facts = replace(resolved.facts, train_size=1000)
    if not said_here.trains:
        pytest.skip("only what trains takes steps")
    if said_here.model.quantize:
        pytest.importorskip(
            "bitsandbytes", reason="an optional extra: pip install 'tunesmith[quantize]'"
        )
    shallow = {"model.path": _shallow(tmp_path, said_here.model.path)}
    if isinstance(said_here, RLConfig):
        judges = [
            m.model_copy(update={"path": _shallow(tmp_path, m.path, scores=True)})
            for m in said_here.reward.models
        ]
        shallow["reward.models"] = tuple(judges)
    planned_run = resolve(said_here, facts)
    planned_run = replace(planned_run, said=with_values(planned_run.said, shallow))
    gpus = dry_run(planned_run)
    assert {"load", "train"} <= gpus[FIRST].keys()
    for name, planned, free in planned_devices(planned_run):
        assert max(phase.total for phase in gpus[name].values()) <= min(free, planned.peak), name


def _shallow(folder: Path, name: str, *, scores: bool = False) -> str:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    head = "ForSequenceClassification" if scores else "ForCausalLM"
    kind = SIZES[name]["model_type"].capitalize()
    shape = (
        SIZES[name]
        | {"num_hidden_layers": 2, "architectures": [kind + head]}
        | ({"id2label": {"0": ""}} if scores else {})
    )
    (path / "config.json").write_text(json.dumps(shape))
    return str(path)


def test_ranks_that_torchrun_would_not_start_are_refused() -> None:
    file = ROOT / "examples" / "clusters" / "sft_full.toml"
    said = ["system.trainer_ranks=5"]
    config = load_config(find_kind(file, said), file, said)
    with pytest.raises(
        ConfigError,
        match=r"trainer_ranks = 5, and torchrun starts 16 ranks on 2 machines of 8 GPUs",
    ):
        plan_run(config, "2x8xA100-80GB")


def test_every_recipe_names_a_machine() -> None:
    assert len(FILES) >= 8
    assert {shlex.split(command)[0] for command, _ in cases()} == {
        str(file.relative_to(ROOT)) for file in FILES
    }
