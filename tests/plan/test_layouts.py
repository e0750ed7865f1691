"""What a run gets of a machine with several GPUs when nothing was said, and what is left as it was
said."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.support.hardware_table import MODELS
from tunesmith.config.commands import DistillConfig, DPOConfig, GenerateConfig, RFTConfig, RMConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cost.copies import adapter_numbers
from tunesmith.plan.cost.memory import kv_bytes_per_token, planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.layouts import layouts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.said import open_plan

SMALL = ModelFacts(500_000_000, 24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True)
QWEN_7B = MODELS["7B (Qwen 2.5)"]
LLAMA_70B = MODELS["70B (Llama 3)"]
KINDS: dict[Any, list[str]] = {
    SFTConfig: [],
    RMConfig: [],
    DPOConfig: [],
    GenerateConfig: [],
    RLConfig: ['reward.functions=["math"]'],
    RFTConfig: ['reward.functions=["math"]', "rft.threshold=1"],
    DistillConfig: ["teacher.path=org/t"],
}
THREE = replace(QWEN_7B, parameters=3_000_000_000, layers=16)
VLLM = ("system.engine=vllm",)
TENSOR = "system.vllm.tensor_parallel_size"


def facts(on: str, model: ModelFacts | None, **changes: Any) -> Facts:
    return Facts(machine(on), model, **{"train_size": 1000, "longest": 1000, **changes})


def resolved(kind: Any, on: str, model: ModelFacts | None, *said: str, **changes: Any) -> AnyPlan:
    base = ["model.path=org/m", "data.train=org/d", *KINDS[kind]]
    return resolve(load_config(kind, None, [*base, *said]), facts(on, model, **changes))


def layout(*arguments: Any, **changes: Any) -> dict[str, Any]:
    config = resolved(*arguments, **changes)
    values = {
        key: config.settings.get(f"system.{key}")
        for key in ("trainer_ranks", "zero_stage", "engines", "hybrid")
    }
    return values | {"tensor": config.settings.get(TENSOR)}


@pytest.mark.parametrize(
    "kind", [SFTConfig, DPOConfig, RMConfig, DistillConfig, RLConfig, RFTConfig]
)
def test_every_gpu_trains_with_a_whole_copy_where_it_fits(kind: Any) -> None:
    found = resolved(kind, "8xH100", SMALL)
    assert found.settings["system.trainer_ranks"] == 8 and found.settings["system.zero_stage"] in (
        0,
        1,
    )
    reasons = {d.key: d.reason for d in found.reasons}
    assert (
        "all 8 GPUs" in reasons["system.trainer_ranks"]
        and "of 85GB" in reasons["system.zero_stage"]
    )


@pytest.mark.parametrize("kind", [SFTConfig, DPOConfig, RMConfig, RLConfig])
def test_what_does_not_fit_one_is_sharded(kind: Any) -> None:
    found = resolved(kind, "8xH100", QWEN_7B)
    assert found.settings["system.trainer_ranks"] == 8 and found.settings["system.zero_stage"] > 0
    assert not found.said.lora.on
    for _, planned, free in planned_devices(found):
        assert planned.peak <= free


def test_engines_and_trainer_take_turns_on_all_gpus() -> None:
    assert layout(RLConfig, "8xH100", SMALL) == {
        "trainer_ranks": 8, "zero_stage": 1, "engines": 8, "hybrid": True, "tensor": None,
    }  # fmt: skip
    config = resolved(RLConfig, "8xH100", SMALL)
    assert (
        config.settings["system.engine_process"] and config.settings["system.weight_plane"] == "ipc"
    )


@pytest.mark.parametrize("plane", ["nccl", "memory"])
def test_where_both_go_on_at_once_each_has_the_share_with_the_fastest_step(plane: str) -> None:
    said = ("rollout.max_staleness=1", f"system.weight_plane={plane}")
    found = resolved(RLConfig, "8xH100", SMALL, *said)
    seconds = step_seconds(found)["step"]
    for ranks in range(1, 8):
        shares = (f"system.trainer_ranks={ranks}", f"system.engines={8 - ranks}")
        other = resolved(RLConfig, "8xH100", SMALL, *said, *shares)
        assert step_seconds(other)["step"] >= seconds, ranks


@pytest.mark.more
def test_where_both_go_on_at_once_they_have_gpus_of_their_own() -> None:
    found = layout(RLConfig, "8xH100", SMALL, "rollout.max_staleness=1")
    assert (found["trainer_ranks"] + found["engines"], found["hybrid"]) == (8, False)
    thirty = replace(
        QWEN_7B,
        parameters=32 * 10**9,
        layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        heads=40,
    )
    found = layout(RLConfig, "16xH200", thirty, "rollout.max_staleness=1", *VLLM)
    config = resolved(RLConfig, "16xH200", thirty, "rollout.max_staleness=1", *VLLM)
    assert found["trainer_ranks"] + found["engines"] * found["tensor"] <= 16
    assert config.settings["system.zero_stage"] > 0 and config.settings["system.hybrid"] is False


def test_an_engine_that_trains_nothing_is_split_as_far_as_it_pays() -> None:
    """70B fits two GPUs, which would then hold few requests."""
    assert layout(GenerateConfig, "8xA100-80GB", QWEN_7B, *VLLM)["tensor"] == 1
    split = layout(GenerateConfig, "8xA100-80GB", LLAMA_70B, *VLLM)
    assert split["tensor"] == 4 and split["engines"] == 2
    with pytest.raises(CapacityError):
        resolved(GenerateConfig, "8xA100-80GB", LLAMA_70B)  # the local engine is on one GPU


def test_ranks_of_an_engine_have_as_many_heads_of_keys_each_or_a_copy_of_one() -> None:
    """As vLLM asserts: 10 heads are not divided by 4, and 4 are copied by 8 ranks."""
    ten = replace(LLAMA_70B, heads=40, kv_heads=10)
    assert layout(GenerateConfig, "8xA100-80GB", ten, *VLLM)["tensor"] == 2
    with pytest.raises(ConfigError, match=r"use one of \[1, 2, 5, 10, 20, 40\]"):
        resolved(GenerateConfig, "8xA100-80GB", ten, *VLLM, f"{TENSOR}=4")
    four = replace(LLAMA_70B, kv_heads=4)
    split = [resolved(GenerateConfig, "8xA100-80GB", four, *VLLM, f"{TENSOR}={n}") for n in (4, 8)]
    per_token = 2 * 80 * 4 * 128 * 2
    assert [kv_bytes_per_token(plan, four) for plan in split] == [per_token, 2 * per_token]


def test_an_engine_on_its_own_gpu_holds_a_draft_and_an_adapter_too() -> None:
    model = replace(QWEN_7B, family="qwen2")
    said = (*VLLM, "rollout.max_staleness=1", "lora.rank=12")
    plan = resolved(RLConfig, "2xH100-80GB", model, *said, draft=SMALL)
    engine = dict(each[:2] for each in planned_devices(plan))["engine"]
    numbers = (model.parameters or 0) + (SMALL.parameters or 0) + adapter_numbers(model, 16)
    assert plan.reserved_rank == 16 and engine.engine == 2 * numbers


def test_ranks_share_sequences_that_fit_no_rank_alone() -> None:
    for longest, alone in ((8_000, True), (300_000, False), (800_000, False)):
        found = resolved(
            SFTConfig, "8xH200", replace(QWEN_7B, context=2**20), longest=longest
        ).settings
        assert (
            found["system.trainer_ranks"] == 8
            and (found["system.sequence_parallel.size"] == 1) == alone
        )
    ring = 'system.sequence_parallel={type="ring", size=8}'
    assert resolved(SFTConfig, "8xH200", QWEN_7B, ring).settings["system.trainer_ranks"] == 8, (
        "28 heads are not divided"
    )
    said = resolved(
        SFTConfig, "8xH200", QWEN_7B, "system.sequence_parallel.size=4", "train.batch_size=1"
    ).settings
    assert (said["system.trainer_ranks"], said["system.sequence_parallel.size"]) == (4, 4)


@pytest.mark.parametrize(
    ("kind", "on"), [(SFTConfig, "8xH100"), (DPOConfig, "8xH100"), (SFTConfig, "4x8xH100")]
)
def test_gpus_that_a_small_batch_leaves_over_share_its_sequences(kind: Any, on: str) -> None:
    said = ("data.max_tokens=16384", "train.batch_size=2", "lora.rank=16")
    changes = {"longest": 16384, "together": 16384 if kind is SFTConfig else 32768}
    found = resolved(kind, on, QWEN_7B, *said, **changes)
    assert found.settings["system.sequence_parallel.size"] == 4
    assert found.settings["system.trainer_ranks"] == 8
    seconds = step_seconds(found)["step"]
    for size in (1, 2, 4):
        shared = f"system.sequence_parallel.size={size}"
        other = resolved(kind, on, QWEN_7B, *said, shared, **changes)
        assert other.settings["system.trainer_ranks"] == 2 * size
        assert step_seconds(other)["step"] >= seconds


def test_what_was_said_stays() -> None:
    for said, expected in (
        (("system.trainer_ranks=2",), {"trainer_ranks": 2}),
        (("system.zero_stage=3",), {"trainer_ranks": 8, "zero_stage": 3}),
        (("system.hybrid=false",), {"hybrid": False}),
        (("system.engines=3",), {"engines": 3}),
        (("system.engine_process=false",), {"trainer_ranks": 1, "engines": 1}),
        (("system.trainer_ranks=1", "system.engines=1"), {"trainer_ranks": 1, "engines": 1}),
        (('system.weight_plane="nccl"',), {"hybrid": False}),
        (
            ('system.weight_plane="ipc"', "system.engine_process=true"),
            {"trainer_ranks": 8, "engines": 8, "hybrid": True},
        ),
        (
            ('system.weight_plane="ipc"', "system.engine_process=true", "system.trainer_ranks=1"),
            {"trainer_ranks": 1, "engines": 1, "hybrid": True},
        ),
        (('system.device="cuda:3"',), {"trainer_ranks": 1, "engines": 1}),
        (('system.device="cpu"',), {"trainer_ranks": 1, "engines": 1, "hybrid": False}),
    ):
        assert expected.items() <= layout(RLConfig, "8xH100", SMALL, *said).items(), said


@pytest.mark.parametrize("kind", [SFTConfig, RLConfig, GenerateConfig])
@pytest.mark.parametrize("model", [SMALL, QWEN_7B, None])
def test_resolving_again_changes_nothing(kind: Any, model: ModelFacts | None) -> None:
    once = resolved(kind, "8xH200", model)
    assert resolve(once.said, facts("8xH200", model)) == once


@pytest.mark.parametrize("kind", [SFTConfig, RLConfig, DPOConfig])
def test_one_device_and_a_model_of_unknown_size_are_as_before(kind: Any) -> None:
    for on, model in (("H200", SMALL), ("8xH200", None)):
        found = resolved(kind, on, model)
        devices = found.devices
        assert (devices.trainer_ranks, devices.zero_stage, devices.engine_process) == (1, 0, False)
        assert not {"system.trainer_ranks", "system.zero_stage", "system.engines"} & {
            d.key for d in found.reasons
        }


def test_gpus_of_another_kind_or_with_another_program_are_left_alone() -> None:
    h100 = machine("H100").gpus[0]
    l4 = machine("L4").gpus[0]
    busy = replace(h100, memory_free=h100.memory_free // 2)
    for gpus, ranks in (((h100, h100, l4), 2), ((h100, busy, h100), 1), ((l4, h100), 1)):
        known = facts("2xH100", SMALL)
        known = replace(known, hardware=replace(known.hardware, gpus=gpus))
        config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d"])
        plan = resolve(config, known)
        assert plan.settings["system.trainer_ranks"] == ranks
        assert any("take no part" in note for note in plan.notes) == (l4 in gpus)
        assert not any("other programs use it" in note for note in plan.notes)
    known = replace(known, hardware=replace(known.hardware, gpus=(busy, h100)))
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d"])
    assert any("CUDA_VISIBLE_DEVICES" in note for note in resolve(config, known).notes)


def test_nothing_is_compiled_for_gpus_that_triton_does_not_know() -> None:
    old = replace(machine("V100-16GB").gpus[0], name="NVIDIA TITAN Xp", capability=(6, 1))
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d"])
    for gpu, compiled in ((old, False), (replace(old, capability=(7, 0)), "default")):
        known = facts("H100", replace(SMALL, family="llama"))
        known = replace(known, hardware=replace(known.hardware, gpus=(gpu,)))
        assert resolve(config, known).settings["system.compile"] == compiled


def test_what_is_learned_stays() -> None:
    one = resolved(SFTConfig, "H200", SMALL)
    many = resolved(SFTConfig, "8xH200", SMALL)
    for key, value in one.settings.items():
        assert key.startswith("system.") or many.settings[key] == value
    few = resolved(SFTConfig, "8xH200", SMALL, "train.batch_size=3")
    assert few.settings["system.trainer_ranks"] == 3, "no rank is without a sample"


@pytest.mark.more
def test_the_fastest_that_fits_is_chosen() -> None:
    """Of all layouts that can be said, none that fits has a shorter step."""
    chosen = resolved(RLConfig, "8xA100-80GB", THREE)
    known = facts("8xA100-80GB", THREE)
    best = step_seconds(chosen)["step"]
    tried = 0
    base = ["model.path=org/m", "data.train=org/d", *KINDS[RLConfig], "system.device=cuda"]
    for each in layouts(open_plan(load_config(RLConfig, None, base), known)):
        said = [
            f"{key}={str(value).lower()}"
            for key, value in each.settings.items()
            if "vllm" not in key
        ]
        try:
            other = resolved(RLConfig, "8xA100-80GB", THREE, *said)
        except CapacityError:
            continue
        if all(planned.peak <= free for _, planned, free in planned_devices(other)):
            tried += 1
            assert step_seconds(other)["step"] >= best
    assert tried >= 4


def test_more_gpus_are_offered_with_the_numbers() -> None:
    with pytest.raises(
        CapacityError,
        match=r"offload_optimizer = true .*, or 2 such GPUs with system\.zero_stage = 3",
    ):
        resolved(SFTConfig, "A100-80GB", QWEN_7B, "system.offload_optimizer=false")
    with pytest.raises(CapacityError, match=r"on each of 4 devices"):
        resolved(SFTConfig, "4xA100-80GB", LLAMA_70B)
    found = resolved(SFTConfig, "8x8xH100", LLAMA_70B, "train.batch_size=64", ranks_here=8).settings
    assert (found["system.trainer_ranks"], found["system.zero_stage"]) == (64, 3) and found[
        "system.shard_size"
    ] in (
        8,
        16,
        32,
        64,
    )


def test_a_separate_critic_is_sharded_also_under_a_launcher() -> None:
    ppo = ("algorithm.name=ppo", "system.trainer_ranks=8")
    assert (
        resolved(RLConfig, "8xH100", QWEN_7B, *ppo, ranks_here=8).settings["system.zero_stage"] > 0
    )
    assert resolved(RLConfig, "8xH100", QWEN_7B, *ppo[:1]).settings["system.zero_stage"] > 0


@pytest.mark.parametrize(("said", "stage"), [((), 0), (("system.zero_stage=3",), 3)])
def test_on_a_cpu_nothing_is_sharded_or_shared_unless_it_is_said(
    said: tuple[str, ...], stage: int
) -> None:
    config = load_config(
        SFTConfig, None, ["model.path=org/m", "data.train=org/d", "system.trainer_ranks=2", *said]
    )
    found: set[tuple[int, int]] = set()
    for size in range(12, 40, 2):
        cpu = Hardware("CPU", 8, size * 10**9, size * 10**9, bf16=True)
        with suppress(CapacityError):
            system = resolve(config, replace(facts("H100", SMALL), hardware=cpu)).settings
            found.add((system["system.zero_stage"], system["system.sequence_parallel.size"]))
    assert found == {(stage, 1)}


@pytest.mark.slow
def test_a_student_shares_no_sequence_with_a_teacher_whose_heads_are_not_known() -> None:
    model = replace(QWEN_7B, context=2**20)
    assert (
        resolved(SFTConfig, "8xH200", model, longest=300_000).settings[
            "system.sequence_parallel.size"
        ]
        > 1
    )
    assert (
        resolved(SFTConfig, "8xH200", model, longest=900_000).settings[
            "system.sequence_parallel.size"
        ]
        > 1
    )
    with pytest.raises(CapacityError):
        resolved(DistillConfig, "8xH200", model, longest=900_000)
    said = resolved(DistillConfig, "8xH200", SMALL, "system.sequence_parallel.size=2").settings
    assert said["system.sequence_parallel.size"] == 2


@pytest.mark.parametrize("engines", range(1, 8))
def test_the_trainer_has_the_gpus_that_engines_leave(engines: int) -> None:
    found = layout(
        RLConfig, "8xH100", SMALL, "rollout.max_staleness=1", f"system.engines={engines}"
    )
    assert (found["engines"], found["trainer_ranks"], found["hybrid"]) == (
        engines,
        8 - engines,
        False,
    )


def test_too_many_engines_are_refused_with_the_number_of_gpus() -> None:
    for kind, said in ((RLConfig, "rollout.max_staleness=1"), (GenerateConfig, "system.threads=1")):
        with pytest.raises(ConfigError) as caught:
            resolved(kind, "8xH100", SMALL, "system.engines=9", said)
        assert "this process sees 8" in str(caught.value) and "engine_process" not in str(
            caught.value
        )
    with pytest.raises(ConfigError) as caught:
        resolved(RLConfig, "8xH100", SMALL, *VLLM, "system.vllm.tensor_parallel_size=3")
    assert "attention heads" in str(caught.value) and "engine_process" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "least"),
    [
        (["system.zero_stage=3", "system.shard_size=16"], "divisor of 8"),
        (["system.zero_stage=2", "system.shard_size=3"], "2 would be left over"),
        (["system.sequence_parallel.size=16"], "system.trainer_ranks = 8 is not a multiple"),
    ],
)
def test_sizes_that_do_not_divide_are_told_with_all_gpus(said: list[str], least: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(SFTConfig, "8xH100", SMALL, *said)
    assert least in str(caught.value) and "there is 1" not in str(caught.value)


def test_an_engine_of_several_stages_takes_as_many_gpus() -> None:
    stages = "system.vllm.pipeline_parallel_size=2"
    assert layout(GenerateConfig, "8xH100", QWEN_7B, *VLLM, stages)["engines"] == 4
    found = layout(RLConfig, "8xH100", SMALL, *VLLM, stages, "rollout.max_staleness=1")
    assert found["trainer_ranks"] + 2 * found["engines"] == 8 and found["tensor"] == 1


@pytest.mark.parametrize(
    ("kind", "said", "where"),
    [
        (RLConfig, (), "on all GPUs"),
        (RLConfig, ("rollout.max_staleness=1",), "on the GPUs that do not train"),
        (RFTConfig, (), "on all GPUs"),
        (GenerateConfig, (), "on all GPUs"),
    ],
)
def test_reasons_say_where_engines_are(kind: Any, said: tuple[str, ...], where: str) -> None:
    reasons = {each.key: each.reason for each in resolved(kind, "8xH100", SMALL, *said).reasons}
    assert reasons["system.engines"] == where
