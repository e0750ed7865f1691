"""Where ranks and engines are that a launcher starts on several machines, without Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.hardware_table import MODELS
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.layouts import layouts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import contradictions
from tunesmith.plan.said import open_plan
from tunesmith.run.assembly.checking import facts_of_run, with_launched_ranks
from tunesmith.run.specs import engines

AHEAD = "rollout.max_staleness=1"
VLLM = ("system.engine=vllm",)
QWEN_7B = MODELS["7B (Qwen 2.5)"]
CPU = Hardware("CPU", cores=8, memory_total=256 * 10**9, memory_available=240 * 10**9, bf16=True)


def rl_config(*said: str) -> RLConfig:
    base = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    return load_config(RLConfig, None, [*base, *said])


def facts(hardware: Hardware, ranks: int) -> Facts:
    return Facts(hardware, QWEN_7B, train_size=1000, longest=1000, ranks_here=ranks)


def launched(*said: str, on: str = "2x8xH100", ranks: int = 8) -> AnyPlan:
    return resolve(rl_config(*said), facts(machine(on), ranks))


def machines(plan: AnyPlan) -> list[tuple[int, int]]:
    """Of each machine, the trainer ranks and the GPUs of engines."""
    devices = plan.devices
    each = devices.ranks_per_engine
    numbers = range(devices.machines)
    return [(devices.ranks_on(n), each * devices.engines_on(n, plan.gpus)) for n in numbers]


@pytest.mark.parametrize(
    ("said", "ranks", "expected", "plane"),
    [
        (("system.hybrid=true",), 8, [(8, 8), (8, 8)], "ipc"),
        (("system.trainer_ranks=8", AHEAD), 8, [(8, 0), (0, 8)], "nccl"),
        (("system.trainer_ranks=4", AHEAD), 8, [(4, 4), (0, 8)], "nccl"),
        (("system.trainer_ranks=8", AHEAD), 4, [(4, 4), (4, 4)], "nccl"),
        (("system.trainer_ranks=8", AHEAD, "system.engines=3"), 4, [(4, 2), (4, 1)], "nccl"),
        (("system.engines=4", "system.hybrid=true"), 8, [(8, 2), (8, 2)], "ipc"),
        (
            ("system.hybrid=true", *VLLM, "system.vllm.tensor_parallel_size=4"),
            8,
            [(8, 8), (8, 8)],
            "ipc",
        ),
        # Of the 3 GPUs that each machine has left, no engine gets some of one and some of another.
        (
            ("system.trainer_ranks=10", AHEAD, *VLLM, "system.vllm.tensor_parallel_size=2"),
            5,
            [(5, 2), (5, 2)],
            "nccl",
        ),
    ],
)
def test_ranks_fill_one_machine_after_another_and_engines_have_the_rest(
    said: tuple[str, ...], ranks: int, expected: list[tuple[int, int]], plane: str
) -> None:
    found = launched(*said, ranks=ranks)
    assert machines(found) == expected
    assert found.devices.weight_plane == plane
    reasons = {each.key: each.reason for each in found.reasons}
    shown = " + ".join(str(count) for count, _ in expected)
    assert "system.trainer_ranks" in found.given or shown in reasons["system.trainer_ranks"]
    counts = [gpus // found.devices.ranks_per_engine for _, gpus in expected]
    assert "system.engines" in found.given or (
        " + ".join(map(str, counts)) in reasons["system.engines"]
    )


def test_no_gpu_is_given_to_two_processes_and_none_to_an_engine_of_two_machines() -> None:
    found = open_plan(launched(*VLLM).said, facts(machine("3x8xH100"), 6))
    some = [*layouts(found.with_devices(device="cuda", dtype="bfloat16"))]
    assert len({(each.trainer_ranks, each.tensor, each.hybrid) for each in some}) > 10
    for each in some:
        devices = each.of(found.with_devices(device="cuda", dtype="bfloat16")).devices
        places = devices.engine_places(8)
        gpus = [(place.machine, gpu) for place in places for gpu in place.gpus or ()]
        assert len(gpus) == len(set(gpus)) and all(gpu < 8 for _, gpu in gpus)
        assert sum(devices.ranks_on(n) for n in range(3)) == devices.trainer_ranks <= 18
        training = {(n, gpu) for n in range(3) for gpu in range(devices.ranks_on(n))}
        assert devices.hybrid or not training & {*gpus}


def test_on_cpus_each_machine_has_an_engine_and_its_share_of_the_threads() -> None:
    small = replace(QWEN_7B, parameters=10**9)
    known = replace(facts(replace(CPU, nodes=3), 2), model=small, longest=40)
    plan = resolve(rl_config("system.trainer_ranks=6"), known)
    assert machines(plan) == [(2, 1)] * 3
    assert plan.devices.weight_plane == "gloo"
    assert plan.settings["system.threads"] == CPU.cores // 2
    assert plan.trainer_memory == plan.free_memory // 2
    ahead = resolve(rl_config("system.trainer_ranks=6", AHEAD), known)
    assert ahead.settings["system.threads"] == CPU.cores // 3


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("system.weight_plane=memory", "system.weight_plane"),
        ("system.engine_process=false", "system.engine_process"),
        ('system.engine="sglang"', "system.engine"),
    ],
)
def test_what_needs_one_machine_is_refused(said: str, key: str) -> None:
    known = facts(machine("2x8xH100"), 8)
    plan = open_plan(rl_config(said), known).with_devices(device="cuda")
    assert any(
        key in problem.keys and "2 machines" in problem.text for problem in contradictions(plan)
    )
    one = replace(known, hardware=replace(known.hardware, nodes=1))
    plan = open_plan(rl_config(said), one).with_devices(device="cuda")
    assert not any("machines" in problem.text for problem in contradictions(plan))


def test_too_many_engines_are_counted_over_all_machines() -> None:
    with pytest.raises(ConfigError, match=r"2 machines have 8 each, with room for 8") as refused:
        launched("system.trainer_ranks=8", "system.engines=9", AHEAD)
    assert "system.engines" in refused.value.problems[0].keys


@pytest.mark.parametrize(("gpus", "ranks"), [(8, None), (0, 16)])
def test_a_plan_chooses_which_gpus_of_a_launch_train(
    gpus: int, ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"RANK": 0, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8, "LOCAL_RANK": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    there = replace(CPU, gpus=machine("8xH100").gpus[:gpus])
    monkeypatch.setattr("tunesmith.run.assembly.checking.read_hardware", lambda: there)
    said = with_launched_ranks(rl_config())
    assert said.system.trainer_ranks == ranks
    known = facts_of_run(said)
    assert (known.hardware.nodes, known.ranks_here) == (2, 8)
    fewer = with_launched_ranks(rl_config("system.trainer_ranks=4"))
    assert fewer.system.trainer_ranks == 4


def test_this_machines_gpus_are_named_as_its_processes_see_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    devices = launched("system.trainer_ranks=4", AHEAD, *VLLM).devices
    found: dict[Any, Any] = engines.local_gpus(devices)
    assert found["actor"] == [("8",), ("9",), ("10",), ("11",)]
    own = [
        names
        for names, place in zip(found["rollout"], devices.engine_places(8), strict=True)
        if place.machine == 0
    ]
    assert sorted(name for names in own for name in names) == ["12", "13", "14", "15"]
