"""Which engine samples where no setting names one: engines x machines, with and without vLLM. What
is installed where the tests run plays no part."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.hardware_table import MODELS
from tests.support.machine_facts import CPU, SMALL
from tunesmith.config.commands import GenerateConfig, RFTConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import CapacityError, ConfigError, ModelError
from tunesmith.plan.cost.memory import kept_of_request, planned_devices
from tunesmith.plan.cost.seconds import TO_THE_HOST, step_seconds
from tunesmith.plan.facts.adapter import SavedAdapter, read_adapter
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts, FastEngine
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.run.assembly import checking, planning
from tunesmith.run.engines import interpreter

QWEN_7B = MODELS["7B (Qwen 2.5)"]
THERE = FastEngine("vllm", "installed in this environment")
MISSING = FastEngine("vllm", "it is not installed", usable=False)
ENGINE = "system.engine"
SYNC = "system.adapter_sync"
CROWD = "rollout.prompts_per_step=1024"
KINDS: dict[type[RunConfig], list[str]] = {
    RLConfig: ['reward.functions=["math"]'],
    RFTConfig: ['reward.functions=["math"]', "rft.threshold=1"],
    GenerateConfig: [],
    SFTConfig: [],
}


def config(kind: Any, *said: str) -> Any:
    return load_config(kind, None, ["model.path=org/m", "data.train=org/d", *KINDS[kind], *said])


def seen(on: str) -> Hardware:
    """A machine that is there."""
    return CPU if on == "cpu" else replace(machine(on), named=False)


def plan(kind: Any, on: str, *said: str, fast: FastEngine | None = THERE, **known: Any) -> AnyPlan:
    facts = Facts(seen(on), QWEN_7B, train_size=1000, longest=1000, fast_engine=fast)
    return resolve(config(kind, *said), replace(facts, **known))


def why(plan: AnyPlan) -> str:
    return next(each.reason for each in plan.reasons if each.key == ENGINE)


@pytest.mark.parametrize("kind", [RLConfig, GenerateConfig])
@pytest.mark.parametrize("on", ["H100-80GB", "8xH100-80GB"])
def test_gpus_sample_with_vllm_where_it_is(kind: Any, on: str) -> None:
    there = plan(kind, on)
    assert there.settings[ENGINE] == "vllm" == there.devices.engine.name
    assert THERE.where in why(there) and ENGINE not in there.given
    assert there.settings["system.vllm.prefix_caching"] is not None  # vLLM's own keys follow
    without = plan(kind, on, fast=MISSING)
    assert without.settings[ENGINE] == "local" == without.devices.engine.name
    assert MISSING.where in why(without)
    assert plan(kind, on, "system.engine=local").settings[ENGINE] == "local"
    assert plan(kind, on, fast=None).settings[ENGINE] == "local"


@pytest.mark.parametrize(("on", "said"), [("cpu", ()), ("H100-80GB", ("system.device=cpu",))])
def test_cpus_sample_with_the_own_engine(on: str, said: tuple[str, ...]) -> None:
    found = plan(RLConfig, on, *said, model=SMALL)
    assert found.settings[ENGINE] == "local" and not found.devices.engine.third_party
    assert not any(entry.key == ENGINE for entry in found.reasons)


def test_what_samples_nothing_has_no_engine() -> None:
    found = plan(SFTConfig, "8xH100-80GB")
    assert not any(entry.key == ENGINE for entry in found.reasons)
    with pytest.raises(ConfigError, match=r"system\.vllm\.eager"):
        plan(SFTConfig, "8xH100-80GB", "system.vllm.eager=true")


def test_what_vllm_lacks_costs_seconds_that_the_plan_says() -> None:
    without = plan(RLConfig, "8xH100-80GB", fast=MISSING)
    [note] = [note for note in without.notes if "pip install 'tunesmith[vllm]'" in note]
    assert " s, and " in note
    [note] = plan(GenerateConfig, "H100-80GB", fast=MISSING).notes
    assert "pip install 'tunesmith[vllm]'" in note
    for said in ((), ("system.engine=local",)):
        assert not any("pip install" in note for note in plan(RLConfig, "H100-80GB", *said).notes)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        (("rollout.temperature=0.001",), "rollout.temperature"),
        (("lora.rank=8", "model.quantize=int8"), "model.quantize"),
        (("system.max_prefill_tokens=4096",), "system.max_prefill_tokens"),
        (("system.draft_model=org/d", "rollout.min_p=0.1"), "rollout.min_p"),
    ],
)
def test_what_vllm_cannot_do_is_done_by_the_own_engine(
    said: tuple[str, ...], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", sized)
    found = plan(RLConfig, "H100-80GB", *said)
    assert found.settings[ENGINE] == "local" and key in why(found)
    with pytest.raises(ConfigError, match=key):
        plan(RLConfig, "H100-80GB", "system.engine=vllm", *said)


def test_what_no_engine_can_do_is_refused_as_before() -> None:
    with pytest.raises(ConfigError, match=r"system\.trainer_ranks"):
        plan(RLConfig, "H100-80GB", "system.trainer_ranks=4")


def test_settings_of_vllm_are_read_where_it_is_derived() -> None:
    assert plan(RLConfig, "H100-80GB", "system.vllm.eager=true").vllm.eager
    for on, fast in (("cpu", THERE), ("H100-80GB", MISSING)):
        with pytest.raises(ConfigError, match=r"system\.vllm\.eager has no effect"):
            plan(RLConfig, on, "system.vllm.eager=true", fast=fast, model=SMALL)


def sized(name: str, **_: Any) -> ModelFacts:
    del name
    return QWEN_7B


def sized_70b(name: str, **_: Any) -> ModelFacts:
    del name
    return MODELS["70B (Llama 3)"]


def on_this(monkeypatch: pytest.MonkeyPatch, on: str, lacking: str | None) -> None:
    """This machine and environment, as ``facts_of_run`` finds them."""
    monkeypatch.setattr(checking, "read_hardware", lambda: seen(on))
    monkeypatch.setattr(checking, "known_model_facts", sized)
    monkeypatch.setattr(interpreter, "vllm_lacking", lambda: lacking)


@pytest.mark.parametrize("lacking", [None, "vLLM 0.1 is installed, and 0.32 works"])
@pytest.mark.parametrize("on", ["H100-80GB", "8xH100-80GB"])
def test_this_environment_is_looked_at(
    on: str, lacking: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_this(monkeypatch, on, lacking)
    fast = checking.facts_of_run(config(RLConfig)).fast_engine
    assert fast is not None and fast.usable == (lacking is None)
    assert lacking is None or fast.where == lacking
    for said in ("system.engine=local", "system.engine=vllm"):
        assert checking.facts_of_run(config(RLConfig, said)).fast_engine is None
    assert checking.facts_of_run(config(SFTConfig)).fast_engine is None
    on_this(monkeypatch, "cpu", lacking)
    assert checking.facts_of_run(config(RLConfig)).fast_engine is None


@pytest.mark.parametrize(("answer", "engine"), [("True 0.32.1", "vllm"), ("True", "local")])
def test_the_environment_of_engine_python_is_looked_at(
    answer: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_this(monkeypatch, "H100-80GB", "it is not in this one")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {answer}\n")
    python.chmod(0o755)
    named = config(RLConfig, f'system.engine_python="{python}"')
    facts = replace(checking.facts_of_run(named), train_size=1000, longest=1000)
    found = resolve(named, facts)
    assert found.settings[ENGINE] == engine and str(python) in why(found) + str(named.system)
    assert found.devices.engine_process and found.settings["system.engine_process"] is True


def test_an_interpreter_is_used_in_processes_unless_these_are_off() -> None:
    python = f'system.engine_python="{sys.executable}"'
    assert plan(RLConfig, "H100-80GB", python).devices.engines_apart
    with pytest.raises(ConfigError, match=r"system\.engine_python"):
        plan(RLConfig, "H100-80GB", python, "system.engine_process=false")


@pytest.mark.parametrize("on", ["H100-80GB", "8xH100-80GB", "2x8xH100-80GB"])
def test_a_machine_that_is_named_is_assumed_to_have_vllm(
    on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "known_model_facts", sized)
    monkeypatch.setattr(interpreter, "vllm_lacking", lambda: "it is not here")
    found = planning.plan_run(config(RLConfig), on)
    assert found.settings[ENGINE] == "vllm"
    assert any("pip install 'tunesmith[vllm]'" in note for note in found.notes)
    own = planning.plan_run(config(RLConfig, "system.engine=local"), on)
    assert own.settings[ENGINE] == "local"
    assert not any("pip install" in note for note in own.notes)


@pytest.mark.slow
def test_several_machines_that_are_named_are_planned_with_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "known_model_facts", sized_70b)
    found = planning.plan_run(config(RLConfig), "8x8xH100-80GB")
    assert found.devices.cluster == "ray" and "system.cluster" not in found.given
    assert found.devices.tensor > 1 and any("system.cluster" in note for note in found.notes)
    used = found.devices.trainer_ranks, found.devices.engines * found.devices.tensor
    assert max(used) == 64 or sum(used) == 64
    # Without Ray, and where Ray does not do it, a launcher starts the run on all machines.
    for said in ("system.cluster=none", "system.engine_process=true"):
        launched = planning.plan_run(config(RLConfig, said), "2x8xH200-141GB")
        devices = launched.devices
        assert devices.cluster == "none" and devices.machines == 2
        assert [devices.engines_on(n, 8) * devices.tensor for n in (0, 1)] == [8, 8]
        assert any("torchrun --nnodes 2 --nproc-per-node 8" in note for note in launched.notes)


@pytest.mark.parametrize(
    ("kind", "on", "said", "share"),
    [
        (GenerateConfig, "8xH100-80GB", (), 0.9),
        (GenerateConfig, "H100-80GB", ("system.engine=local",), 0.9),
        (RLConfig, "8xH100-80GB", ("rollout.max_staleness=1", CROWD), 0.9),
    ],
)
def test_an_engine_alone_on_its_gpu_uses_nine_tenths_of_it(
    kind: Any, on: str, said: tuple[str, ...], share: float
) -> None:
    found = plan(kind, on, *said, train_size=10**6)
    _, needed, free = planned_devices(found)[-1]
    assert share - 0.05 < needed.sampling / free <= share


def test_an_engine_that_shares_its_gpu_in_turns_uses_nine_tenths_of_it() -> None:
    """What the trainer keeps there, weights, keys and values, and a pass."""
    found = plan(RLConfig, "8xH100-80GB", "system.hybrid=true", CROWD, train_size=10**6)
    [(_, needed, free)] = planned_devices(found)
    assert 0.85 < needed.sampling / free <= 0.9


def test_engines_of_runs_that_sample_first_have_room_for_requests() -> None:
    """Also where no step shows how long they take."""
    found = plan(RFTConfig, "8xA10G-24GB")
    assert found.devices.tensor > 1 and found.devices.engine_devices == 8
    kept = kept_of_request(found, QWEN_7B, 1512)
    assert found.memory.kv_bytes * found.devices.ranks_per_engine > 100 * kept


def test_an_engine_with_no_more_room_for_requests_is_not_preferred() -> None:
    long = ("rollout.prompts_per_step=512", "rollout.max_new_tokens=8192", "rollout.group_size=16")
    assert plan(RLConfig, "8xH100-80GB", *long).devices.engine.name == "vllm"


def test_a_derived_layout_may_be_written_down_without_its_engine() -> None:
    shared = 'system.placement.colocate=[["actor", "rollout"]]'
    numbers = ("system.trainer_ranks=16", "system.engines=2", "system.vllm.tensor_parallel_size=8")
    model = replace(MODELS["32B (Qwen 2.5)"], family="qwen2")
    found = plan(RLConfig, "2x8xH100-80GB", "system.cluster=ray", shared, *numbers, model=model)
    assert found.devices.engine.name == "vllm" and found.devices.engine_devices == 16


def test_a_process_that_holds_nothing_is_no_device() -> None:
    [(name, needed, _)] = planned_devices(plan(GenerateConfig, "8xH100-80GB"))
    assert name == "engine" and needed.engine > 0


def test_as_many_requests_run_at_once_as_the_memory_holds() -> None:
    def running(on: str, *said: str, **known: Any) -> int:
        found = plan(GenerateConfig, on, *said, train_size=10**6, **known)
        assert found.settings["system.max_running"] == found.sampling.running
        return found.sampling.running

    assert running("H100-80GB", longest=200) == 1024
    assert running("H100-80GB") == 512  # of 1512 tokens
    assert running("H100-80GB", longest=20_000) == 256
    assert running("H100-80GB", "system.max_running=77") == 77
    assert running("H100-80GB", "system.kv_memory=2GB") == 256
    assert running("cpu", model=SMALL) == 64  # on a CPU more at once are no faster
    learns = plan(RLConfig, "8xH100-80GB", CROWD, longest=100)
    assert learns.settings["system.max_running"] == learns.sampling.running > 256


PLANE = "system.weight_plane"


def host_notes(plan: AnyPlan) -> list[str]:
    return [note for note in plan.notes if PLANE in note]


@pytest.mark.parametrize(
    ("on", "said", "plane"),
    [
        ("8xH100-80GB", ("rollout.max_staleness=1",), "nccl"),
        ("8xH100-80GB", ("system.hybrid=false",), "nccl"),
        ("8xH100-80GB", ("system.hybrid=false", "system.engine=local"), "nccl"),
        ("2xH100-80GB", ("system.engine_process=true", "system.hybrid=false"), "nccl"),
        ("2x8xH100-80GB", ("system.cluster=ray", "system.hybrid=false"), "nccl"),
        ("2x8xH100-80GB", ("system.cluster=ray", "system.hybrid=true"), "ipc"),
        ("8xH100-80GB", ("system.hybrid=true",), "ipc"),
        ("8xH100-80GB", ("system.hybrid=true", "system.vllm.tensor_parallel_size=2"), "ipc"),
        ("8xH100-80GB", ("system.hybrid=true", "system.engine=local", "lora.rank=8"), "ipc"),
        ("H100-80GB", ("system.engine_process=true", "lora.rank=8"), "ipc"),
        ("H100-80GB", (), None),  # in the trainer's process
    ],
)
def test_weights_go_from_gpu_to_gpu(on: str, said: tuple[str, ...], plane: str | None) -> None:
    found = plan(RLConfig, on, *said)
    assert found.devices.weight_plane == found.settings[PLANE] == plane
    assert not host_notes(found)
    assert (found.settings["system.weight_copy"] is not None) == (plane == "nccl")


@pytest.mark.parametrize("plane", ["memory", "gloo"])
def test_a_way_through_the_host_is_priced_and_said(plane: str) -> None:
    own = ("rollout.max_staleness=1", f"{PLANE}={plane}")
    found = plan(RLConfig, "8xH100-80GB", *own)
    [note] = host_notes(found)
    seconds = {"memory": 1.2e-9, "gloo": 2.8e-9}[plane] * 2 * (QWEN_7B.parameters or 0)
    assert f"{seconds:.3g} s" in note and '"nccl"' in note
    assert step_seconds(found)["new weights"] == pytest.approx(seconds)
    [note] = host_notes(plan(RLConfig, "H100-80GB", "system.engine_process=true", own[1]))
    assert '"ipc"' in note
    turns = plan(RLConfig, "8xH100-80GB", "system.hybrid=true", own[1])
    assert any('"ipc"' in note for note in host_notes(turns))
    on_cpu = plan(RLConfig, "cpu", "system.engine_process=true", own[1], model=SMALL)
    assert not host_notes(on_cpu)


def test_shared_memory_that_is_too_small_is_said() -> None:
    """For files of two versions, and half of one: 12.5 MB for each million parameters in
    float32."""
    sizes = {64 << 20: 1, 10**11: 0, None: 0}
    for free, count in sizes.items():
        machine = replace(seen("8xH100-80GB"), shared_memory=free)
        said = ("system.hybrid=true", f"{PLANE}=memory")
        found = plan(RLConfig, "8xH100-80GB", *said, hardware=machine)
        assert sum("/dev/shm" in note for note in found.notes) == count, free
    small = replace(CPU, shared_memory=10**6)
    found = plan(RLConfig, "cpu", "system.engine_process=true", hardware=small, model=SMALL)
    assert any("/dev/shm" in note for note in found.notes)


def test_gpus_that_processes_share_on_ray_have_no_link() -> None:
    said = ("system.cluster=ray", "system.placement={actor={gpus=0.5},rollout={gpus=0.5}}")
    apart = plan(RLConfig, "H100-80GB", *said, model=SMALL, fast=None)
    assert apart.devices.weight_plane == "gloo"


SYNC = "system.adapter_sync"


@pytest.mark.parametrize(
    ("on", "said", "sync", "reserved"),
    [
        ("8xH100-80GB", ("lora.rank=8",), "adapter", 8),
        ("8xH100-80GB", ("lora.rank=17",), "adapter", 32),
        ("H100-80GB", ("lora.rank=16", "system.engine_process=true"), "adapter", 16),
        ("H100-80GB", ("lora.rank=16",), "adapter", 16),  # in the trainer's process
        ("8xH100-80GB", ("lora.rank=600",), "merged", 0),  # vLLM reserves at most 512
        ("8xH100-80GB", ("lora.rank=8", "system.engine=local"), "adapter", 0),
        ("cpu", ("lora.rank=8", "system.engine=vllm"), "merged", 0),  # it is slow there
        ("cpu", ("lora.rank=8", "system.engine=vllm", f"{SYNC}=adapter"), "adapter", 8),
        ("8xH100-80GB", ("lora.rank=8", f"{SYNC}=merged"), "merged", 0),
    ],
)
def test_an_adapter_reaches_engines_alone_where_they_take_it(
    on: str, said: tuple[str, ...], sync: str, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.vllm.vllm_lacking", lambda: None)
    small = replace(SMALL, family="llama", head_dim=32)
    model = small if on == "cpu" else replace(QWEN_7B, family="qwen2")
    found = plan(RLConfig, on, *said, model=model)
    assert found.devices.adapter_sync == sync
    assert found.vllm.adapter_rank == found.reserved_rank == reserved
    assert bool(found.vllm.adapter_modules) == bool(reserved)


def test_targets_are_those_of_the_adapter(tmp_path: Path) -> None:
    qwen = replace(QWEN_7B, family="qwen2")
    said = ("lora.rank=8", 'lora.targets=["q_proj", "mlp.down_proj"]')
    found = plan(RLConfig, "H100-80GB", *said, model=qwen)
    assert found.vllm.adapter_modules == ("q_proj", "down_proj")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    for targets, modules in ((("o_proj",), 1), (None, 7)):
        saved = SavedAdapter(24, targets)
        path = f"lora.path={tmp_path}"
        found = plan(RLConfig, "H100-80GB", path, model=qwen, adapter=saved).vllm
        assert (found.adapter_rank, len(found.adapter_modules)) == (32, modules)


def test_an_adapter_that_vllm_does_not_take_is_merged_with_the_reason_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.vllm.vllm_lacking", lambda: None)
    rare = replace(QWEN_7B, family="helium")
    found = plan(RLConfig, "H100-80GB", "lora.rank=8", model=rare)
    [reason] = [each.reason for each in found.reasons if each.key == SYNC]
    assert found.settings[SYNC] == "merged" and "helium" in reason
    adapter = (f"{SYNC}=adapter", "system.engine=vllm")
    for rank, model in ((8, rare), (600, replace(QWEN_7B, family="qwen2"))):
        with pytest.raises(ConfigError, match=SYNC):
            plan(RLConfig, "H100-80GB", f"lora.rank={rank}", *adapter, model=model)


def test_a_saved_adapter_is_read_before_anything_loads(tmp_path: Path) -> None:
    assert read_adapter(None) is None and read_adapter(tmp_path) is None
    written = {"r": 4, "rank_pattern": {"q_proj": 9}, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    assert read_adapter(tmp_path) == SavedAdapter(9, ("q_proj", "v_proj"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ".*proj"}))
    assert read_adapter(tmp_path) == SavedAdapter(4, None)
    written["base_model_name_or_path"] = "org/Model"
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    assert read_adapter(tmp_path) == SavedAdapter(9, ("q_proj", "v_proj"), "org/Model")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)


def test_a_base_that_makes_room_for_the_trainer_goes_to_the_host_and_back() -> None:
    said = ("lora.rank=8", "system.engine_process=true", "system.hybrid=true")
    found = plan(RLConfig, "H100-80GB", *said, model=replace(QWEN_7B, family="qwen2"))
    base = 2 * (QWEN_7B.parameters or 0)
    assert found.devices.adapter_sync == "adapter" and found.devices.weight_plane == "ipc"
    assert step_seconds(found)["new weights"] == pytest.approx(2 * base / TO_THE_HOST, rel=0.05)


def test_vllm_holds_a_quantised_base_in_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room; the plan counts them. Elsewhere the own engine samples from 4 bits."""
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", sized)
    said = ("lora.rank=8", "model.quantize=nf4")
    found = plan(RLConfig, "H100-80GB", *said, model=replace(QWEN_7B, family="qwen2"))
    assert found.settings[ENGINE] == "vllm" and found.settings[SYNC] == "adapter"
    assert found.vllm.adapter_rank == 8
    engine = planned_devices(found)[0][1].engine
    numbers = QWEN_7B.parameters or 0
    assert 2 * numbers < engine < 2.1 * numbers
    [note] = [note for note in found.notes if "nf4 base" in note]
    assert "15.2GB for each engine" in note
    small = plan(RLConfig, "RTX4090-24GB", *said, model=MODELS["13B (Llama 2)"])
    assert small.settings[ENGINE] == "local" and not any("nf4 base" in n for n in small.notes)


def test_an_engine_whose_copy_leaves_no_room_for_requests_is_not_derived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU of 24 GB, a 7B in 16 bits leaves room for one request beside a base in 4 bits."""
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", sized)
    said = ("lora.rank=8", "model.quantize=nf4")
    found = plan(RLConfig, "RTX4090-24GB", *said)
    assert found.settings[ENGINE] == "local" and "leaves" in why(found)
    there = machine("RTX4090-24GB")
    other = plan(RLConfig, "RTX4090-24GB", *said, "system.engine=vllm", hardware=there)
    assert step_seconds(found)["step"] < 0.6 * step_seconds(other)["step"]


def test_engines_that_train_nothing_are_split_until_they_hold_requests() -> None:
    """70B over two GPUs each would leave keys and values of one request."""
    found = plan(GenerateConfig, "8xH100-80GB", model=MODELS["70B (Llama 3)"])
    assert found.settings["system.vllm.tensor_parallel_size"] >= 4
    small = plan(GenerateConfig, "8xH100-80GB")
    assert small.settings.get("system.engines") == 8


def test_a_refusal_is_of_the_engine_that_lacks_only_memory() -> None:
    """vLLM takes no new weights of gpt-oss on any machine, so more memory would not help there."""
    large = replace(MODELS["70B (Llama 3)"], family="gpt_oss")
    with pytest.raises(CapacityError) as error:
        plan(RLConfig, "8xH100-80GB", model=large)
    assert "does not fit" in str(error.value) and "vllm" not in str(error.value)
    assert "on each of 4 devices" in str(error.value)  # the others would sample
