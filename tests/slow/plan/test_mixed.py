"""Machines with different GPUs: what each kind does in a run, with its own memory and speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.clusters import SIZES
from tests.support.hardware_table import MODELS
from tunesmith.cli.main import app
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.cluster import Bundle, bundles, machines_of, missing
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.machines import machine, machines
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.alternatives import cost
from tunesmith.plan.mixed import kinds_of_machines, parts
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve

BOTH = "2x8xA100-40GB+4x1xH100-80GB"
SLOW = "8xH100-80GB+4x1xL40S-48GB"
BASE = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
AHEAD = "rollout.max_staleness=1"
MANY = ["rollout.prompts_per_step=256", "rollout.max_new_tokens=4096"]
RAY = ["system.cluster=ray", "system.engine=vllm"]
SHARDED = ["system.trainer_ranks=16", "system.zero_stage=3"]
KEPT = "system.gradient_checkpointing=true"


def facts(on: str, model: str = "7B (Qwen 2.5)", **changes: Any) -> Facts:
    first, *others = machines(on)
    found = Facts(first, MODELS[model], train_size=1000, longest=1024, other_hardware=tuple(others))
    return replace(found, **changes)


def resolved(on: str, *said: str, **changes: Any) -> Plan[RLConfig]:
    return resolve(load_config(RLConfig, None, [*BASE, *RAY, *said]), facts(on, **changes))


def notes(plan: Plan[RLConfig]) -> str:
    return "\n".join(plan.notes)


def test_one_kind_trains_and_another_samples_each_with_its_own_memory_and_speed() -> None:
    plan = resolved(BOTH, *MANY, AHEAD)
    assert plan.facts.hardware.in_words == "2x8xA100-40GB"
    assert plan.engine_hardware.in_words == "4x1xH100-80GB" and not any(
        "takes no part" in note for note in plan.notes
    )
    free = {name: room for name, _, room in planned_devices(plan)}
    assert free["trainer"] == machine("A100-40GB").gpus[0].memory_free
    assert free["engine"] == machine("H100-80GB").gpus[0].memory_free
    assert all(needed.peak <= 0.9 * room for _, needed, room in planned_devices(plan))
    assert max(needed.kv for _, needed, _ in planned_devices(plan)) > 40e9, "of the larger card"
    assert (plan.devices.engines, plan.devices.weight_plane) == (4, "nccl")
    wanted = bundles(plan.devices)
    kinds = {(bundle.roles, bundle.accelerator) for bundle in wanted}
    assert {kind for roles, kind in kinds if "rollout" in roles} == {"H100"}
    assert {kind for roles, kind in kinds if "rollout" not in roles} == {"A100"}
    assert missing(wanted, machines_of(plan.facts)) is None
    reasons = {entry.key: entry.reason for entry in plan.reasons}
    assert "2x8xA100-40GB trains, and 4x1xH100-80GB samples" in reasons["system.placement"]
    assert reasons["system.engines"] == "on 4x1xH100-80GB"
    slower = replace(plan.engine_hardware, gpus=machine("L40S").gpus)
    there = replace(plan, facts=replace(plan.facts, engine_hardware=slower))
    ours, theirs = step_seconds(plan), step_seconds(there)
    assert ours["training"] == theirs["training"]
    assert 3 < theirs["sampling"] / ours["sampling"] < 3350 / 864, "by the engines' own bandwidth"
    assert theirs["new weights"] > 2 * ours["new weights"], "over the slower link"


@pytest.mark.parametrize(
    "on", [BOTH, SLOW, "8xH100-80GB+2x8xA100-80GB", "L40S+2xA100-80GB+4xL4-24GB"]
)
def test_the_parts_with_the_fastest_step_are_chosen(on: str) -> None:
    plan = resolved(on, model="1B (Llama 3.2)")
    config = load_config(RLConfig, None, [*BASE, *RAY])
    seconds = [
        step_seconds(resolve(config, part))["step"]
        for part in parts(config, facts(on, "1B (Llama 3.2)"))
    ]
    assert step_seconds(plan)["step"] == min(seconds)
    assert len(seconds) == (9 if on.count("+") == 2 else 4)


def test_machines_that_take_no_part_are_said() -> None:
    plan = resolved("8xH100-80GB+T4-16GB")
    assert plan.facts.engine_hardware is None, "a T4 computes no bfloat16"
    assert "1xT4-16GB takes no part: this run cannot use it" in notes(plan)
    assert {b.accelerator for b in bundles(plan.devices)} == {"H100"}
    plan = resolved(SLOW)
    alone = step_seconds(plan)["step"]
    both = step_seconds(resolved(SLOW, "system.placement.rollout.accelerator=L40S"))["step"]
    assert alone < both and f"instead of {alone:.3g} s" in notes(plan)
    plan = resolved(BOTH, "system.hybrid=true")
    assert plan.facts.engine_hardware is None and notes(plan).count("takes no part") == 1


def test_gpus_that_settings_name_are_taken() -> None:
    placement = "system.placement={actor={accelerator='L40S'}, rollout={accelerator='H100'}}"
    plan = resolved("8xH100-80GB+4xL40S-48GB", placement, model="1B (Llama 3.2)")
    assert plan.facts.hardware.in_words == "4xL40S-48GB"
    with pytest.raises(ConfigError, match=r"no machine has the accelerator .* H100 and L40S"):
        resolved(SLOW, "system.placement.actor.accelerator=A100")
    both = 'colocate=[["actor", "rollout"]]'
    kinds = "actor={accelerator='L40S'}, rollout={accelerator='H100'}"
    with pytest.raises(ConfigError, match="share a GPU, and their accelerator is H100 and L40S"):
        resolved("8xH100-80GB", f"system.placement={{{both}, {kinds}}}")


def test_a_kind_of_gpu_is_asked_of_ray() -> None:
    own = Bundle(("actor",), 1, 1, "H100")
    assert own.resources == {"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001}
    there = [{"CPU": 9.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, {"CPU": 9.0, "GPU": 8.0}]
    assert missing([own] * 8, there) is None
    said = missing([own] * 9, there)
    assert said and "9 GPUs are needed (9 × trainer 1), and the cluster has 8 with H100" in said
    said = missing([Bundle(("rollout",), 1, 4, "L40S")], there)
    assert said and "4 GPUs are needed (1 × engine 4), and the cluster has 0 with L40S" in said


def test_a_cluster_is_described_by_its_kinds_of_machines() -> None:
    def seen(spec: str, kind: str, **changes: Any) -> Any:
        return replace(machine(spec), accelerator=kind, named=False, **changes)

    big = [seen("8xH100-80GB", "H100") for _ in range(3)]
    [one] = kinds_of_machines([*big, seen("2xH100-80GB", "H100")], 0)
    assert (one.nodes, len(one.gpus), one.accelerator) == (3, 8, None)
    [one] = kinds_of_machines([*big, seen("2xH100-80GB", "H100")], 2)
    assert (one.nodes, len(one.gpus)) == (4, 2), "as on the machine of the command"
    small, large = seen("8xA100-40GB", "A100"), seen("8xA100-80GB", "A100")
    [one] = kinds_of_machines([large, small], 8)
    assert one.gpus[0].memory_total == small.gpus[0].memory_total, "Ray does not tell them apart"
    busy = seen("8xH100-80GB", "H100", gpus=tuple(
        replace(gpu, memory_free=gpu.memory_free >> (n < 4)) for n, gpu in enumerate(big[0].gpus)
    ))  # fmt: skip
    [one] = kinds_of_machines([busy], 8)
    assert {gpu.memory_free for gpu in one.gpus} == {big[0].gpus[0].memory_free}
    kinds = kinds_of_machines([seen("4xL40S-48GB", "L40S"), *big], 0)
    assert [(kind.accelerator, kind.nodes) for kind in kinds] == [("H100", 3), ("L40S", 1)]


@pytest.mark.parametrize("spec", ["8xH100-80GB+2xH100-80GB", "8xH100-80GB+this", "this+L4"])
def test_machines_that_do_not_differ_are_not_joined(spec: str) -> None:
    with pytest.raises(ConfigError, match="have different GPUs"):
        machines(spec)
    with pytest.raises(ConfigError, match="is empty"):
        machines("8xH100-80GB+")


def test_two_kinds_have_no_single_price() -> None:
    with pytest.raises(ConfigError, match="two kinds"):
        cost(resolved(BOTH, *MANY, AHEAD, *SHARDED), 2.5)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES["Qwen/Qwen2.5-7B-Instruct"]))
    monkeypatch.chdir(tmp_path)
    common = 'model.path = "model"\ndata.train = "org/d"\n'
    Path("run.toml").write_text(f'{common}reward.functions = ["math"]\n')
    Path("sft.toml").write_text(common)

    def plan(*said: str) -> str:
        done = CliRunner().invoke(app, ["plan", *said])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    shown = plan("run.toml", "--on", BOTH, *MANY, AHEAD, *SHARDED, KEPT)
    assert 'system.cluster = "ray"' in shown and "on 4x1xH100-80GB" in shown
    assert 'rollout = {accelerator = "H100"}' in shown
    shown = plan("run.toml", "--on", "H100-80GB+T4")
    assert "1xT4-16GB takes no part" in shown and 'cluster = "ray"' not in shown
    shown = plan("sft.toml", "--on", "2xA100-40GB+H100-80GB")
    assert "takes no part: with it a step takes at least" in shown
    shown = plan("sft.toml", "--on", "H100-80GB+2xA100-80GB", "system.trainer_ranks=2")
    assert "1xH100-80GB takes no part: this run cannot use it" in shown
