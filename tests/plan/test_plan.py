"""``tunesmith plan``: a run on a machine that is not there, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import HEAVY
from tests.support.machine_facts import CPU
from tests.support.one_command import tunesmith
from tunesmith.cli.main import app
from tunesmith.config.commands import RMConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.config.values import parse_size
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cost.copies import adapter_numbers
from tunesmith.plan.cost.device import PARTS
from tunesmith.plan.cost.memory import planned, planned_devices, planned_roles
from tunesmith.plan.cost.price import LIBRARIES_WITH_NCCL
from tunesmith.plan.cost.seconds import BANDWIDTH_SHARE, FLOPS_SHARE, PASS_SECONDS, step_seconds
from tunesmith.plan.facts.adapter import SavedAdapter
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.report import report_of
from tunesmith.plan.resolve import resolve
from tunesmith.run.assembly.planning import plan_run

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN_72B = QWEN_7B | {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
TINY = QWEN_7B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
ON_RAY = (
    'system.cluster="ray"',
    'system.engine="vllm"',
    "system.trainer_ranks=4",
    "system.zero_stage=3",
    "system.engines=2",
    "system.vllm.tensor_parallel_size=2",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configurations of models, without weights; the data of the run file does not exist."""
    for name, config in {"7b": QWEN_7B, "72b": QWEN_72B, "tiny": TINY}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text('[model]\npath = "7b"\n[data]\ntrain = "org/data"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(kind: type[RunConfig], on: str, *said: str) -> Any:
    base = ["model.path=7b", "data.train=org/data"]
    base += ['reward.functions=["exact_match"]'] if kind is RLConfig else []
    return plan_run(load_config(kind, None, [*base, *said]), on)


@pytest.mark.slow
def test_the_command_needs_neither_the_machine_nor_torch(folder: Path) -> None:
    ended, modules = tunesmith(
        folder, "plan", "run.toml", "lora.rank=16", "--on", "2xA100-80GB", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    assert not modules.intersection(HEAVY)
    found = json.loads(ended.stdout)
    assert found["fits"] and found["machine"]["gpus"] == ["A100-80GB"] * 2
    assert found["layout"]["lora.rank"] == {"value": 16, "reason": "given"}
    assert found["layout"]["model.dtype"]["value"] == "bfloat16"
    [device] = found["memory"]
    assert (
        device["device"] == "trainer"
        and 0 < device["share"] < 1
        and device["phases"]["training"] == device["peak"]
    )
    assert any("data.max_tokens" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        (("--on", "A10G", "model.path=72b"), 3, ["does not fit", "23.6GB are free", "1.32TB"]),
        (("--on", "A11G"), 2, ["A10G-24GB"]),
        (("--on", "H100", "train.lr=0"), 2, ["train.lr"]),
    ],
)
def test_what_is_refused_has_its_exit_code(
    said: tuple[str, ...], code: int, told: list[str]
) -> None:
    done = CliRunner().invoke(app, ["plan", "run.toml", *said])
    assert done.exit_code == code and all(word in done.output for word in told)


def test_what_does_not_fit_is_json_too() -> None:
    done = CliRunner().invoke(app, ["plan", "run.toml", "--on", "A10G", "--json"])
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert not found["fits"] and "lora.rank = 16" in found["problems"][0]


def test_the_table_has_each_part_of_each_role() -> None:
    done = CliRunner().invoke(app, ["plan", "run.toml", "--on", "H200"])
    assert done.exit_code == 0, done.output
    rows = [line.split("  ")[0] for line in done.output.splitlines()]
    for row in (
        "policy: weights",
        "policy: optimizer",
        "while training",
        "at most, at once",
        "free",
        "step",
    ):
        assert row in rows


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (SFTConfig, ()),
        (RLConfig, ("algorithm.name=ppo", "algorithm.kl.coef=0.1", "train.ema_decay=0.9")),
        (RLConfig, ("algorithm.name=ppo", "system.trainer_ranks=2", "system.zero_stage=3")),
        (RLConfig, ("lora.rank=8", "system.engine_process=true")),
    ],
)
def test_the_roles_of_a_device_add_up(kind: type[RunConfig], said: tuple[str, ...]) -> None:
    resolved = plan(kind, "4xH200", "model.path=tiny", *said)
    resolved = replace(resolved, facts=replace(resolved.facts, frozen_parameters=1000))
    whole = planned(resolved)
    roles = planned_roles(resolved)
    assert whole is not None and {"policy"} <= roles.keys()
    for part in PARTS:
        assert sum(getattr(each, part) for each in roles.values()) == getattr(whole, part), part
    if "algorithm.name=ppo" in said:
        assert roles["critic"].optimizer > 0.9 * roles["policy"].optimizer


@pytest.mark.more
def test_roles_of_a_cluster_have_devices_of_their_own() -> None:
    said = (
        *ON_RAY,
        "algorithm.name=ppo",
        "algorithm.kl.coef=0.1",
        "system.gradient_checkpointing=true",
    )
    resolved = plan(RLConfig, "2x8xA100-80GB", *said)
    devices = {name: planned for name, planned, _ in planned_devices(resolved)}
    assert devices.keys() == {"trainer", "engine", "critic", "reference"}
    assert devices["reference"].frozen == 2 * resolved.facts.model.parameters
    assert devices["engine"].engine == resolved.facts.model.parameters  # bfloat16, over two ranks
    assert (
        devices["critic"].optimizer == devices["trainer"].optimizer
        and devices["critic"].activations
    )
    apart = ("system.placement.ref.processes=2", 'system.placement.colocate=[["actor", "critic"]]')
    for stage, share in (
        (3, 1.0),
        (2, 2.0),
    ):  # of the bytes of a copy of 2 bytes a number, over two processes
        resolved = plan(RLConfig, "2x8xA100-80GB", *said, *apart, f"system.zero_stage={stage}")
        shared = {name: planned for name, planned, _ in planned_devices(resolved)}["reference"]
        assert shared.frozen == share * resolved.facts.model.parameters
        assert (shared.activations > devices["reference"].activations) == (stage == 3), (
            "a layer is gathered ahead"
        )
    with pytest.raises(CapacityError, match=r"13 GPUs are needed .*, and the cluster has 8"):
        plan(RLConfig, "8xA100-80GB", *said, "system.placement.colocate=[]")
    together = plan(RLConfig, "8xA100-80GB", *said)
    assert together.devices.placement.colocate == (("actor", "ref", "critic"),)


def test_seconds_follow_operations_and_devices() -> None:
    """By hand: 6 operations for each parameter and token, at a share of the peak rate; a third more
    to recompute; weights and gradients are read again for each micro-batch, and kernels of each
    layer's three passes are launched.
    """
    said = ("system.gradient_checkpointing=false", "train.batch_size=4", "data.max_tokens=100")
    found = plan(SFTConfig, "H200", *said)
    seconds = step_seconds(found)
    weights = found.facts.model.parameters - 152064 * 3584
    pairs = 100 * 101 / 2
    flops = 4 * (6 * weights * 100 + 12 * 28 * 28 * 128 * pairs)
    read = (3 * 2 + 8 + 28) * found.facts.model.parameters + 152064 * 3584 * (2 + 8)
    launched = 3 * 28 * PASS_SECONDS["cuda"]
    beside = read / (4.8e12 * BANDWIDTH_SHARE) + launched
    assert seconds["training"] == pytest.approx(flops / (989e12 * FLOPS_SHARE) + beside, rel=1e-3)
    assert seconds["step"] == seconds["training"]
    assert found.settings["system.zero_stage"] == 0
    two = plan(SFTConfig, "2xH200", *said, "system.zero_stage=0", 'system.device_memory="999GB"')
    seconds_of_two = step_seconds(two)
    spared = flops / (989e12 * FLOPS_SHARE) / 2  # each rank takes the whole optimizer step
    assert seconds_of_two["training"] == pytest.approx(seconds["training"] - spared, rel=1e-3)
    assert seconds_of_two["between GPUs"] == pytest.approx(
        8 * found.facts.model.parameters / 2 / 450e9
    )
    lora = plan(
        SFTConfig, "2xH200", *said, "lora.rank=2", "system.trainer_ranks=2", "system.zero_stage=0"
    )
    assert step_seconds(lora)["between GPUs"] == pytest.approx(
        8 * adapter_numbers(found.facts.model, 2) / 2 / 450e9
    )
    again = plan(SFTConfig, "H200", *said[1:], "system.gradient_checkpointing=true")
    whole = step_seconds(again)["training"]
    assert seconds["training"] < whole < 4 / 3 * seconds["training"]
    half = plan(SFTConfig, "H200", *said[1:], "system.gradient_checkpointing=0.5")
    assert step_seconds(half)["training"] == pytest.approx((seconds["training"] + whole) / 2)


def test_training_computes_a_shared_prompt_once() -> None:
    """By hand: of 2 groups of 4, 6 samples need no prompt of their own."""
    said = (
        "system.gradient_checkpointing=false",
        "system.zero_stage=0",
        "data.max_prompt_tokens=100",
    )
    said += ("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=20")
    said += ('system.device_memory="400GB"',)
    seconds = {}
    for share in ("true", "false"):
        found = plan(RLConfig, "H200", *said, f"system.share_prompts={share}")
        seconds[share] = step_seconds(found)["training"]
    weights = found.facts.model.parameters - 2 * 152064 * 3584
    pairs = 100 * 101 / 2
    prompt = 6 * weights * 100 + 12 * 28 * 28 * 128 * pairs
    assert seconds["false"] - seconds["true"] == pytest.approx(
        6 * prompt / (989e12 * FLOPS_SHARE), rel=1e-3
    )


@pytest.mark.parametrize(("gpu", "inside", "beyond"), [("H100", 450e9, 50e9), ("L4", 32e9, 16e9)])
def test_what_leaves_a_machine_is_slower(gpu: str, inside: float, beyond: float) -> None:
    """An adapter of 400 Gb/s per GPU; where PCIe alone joins them, two share an adapter."""
    said = [
        "model.path=tiny",
        'system.cluster="ray"',
        "system.trainer_ranks=8",
        "system.zero_stage=3",
    ]
    said += ["system.engines=8", 'system.placement.colocate=[["actor","rollout"]]']
    for size in (8, 4):
        resolved = plan(RLConfig, f"2x{size}x{gpu}", *said)
        within = (
            8 * resolved.facts.model.parameters * (size - 1) / size / inside
        )  # gathered twice, and summed in float32
        among = (
            8 * resolved.facts.model.parameters / 4 / 2 / beyond if size == 4 else 0.0
        )  # the sums of two copies' rows
        assert resolved.settings["system.shard_size"] == size
        assert step_seconds(resolved)["between GPUs"] == pytest.approx(within + among, rel=1e-3)


def test_working_at_once_takes_the_longer_phase() -> None:
    said = (*ON_RAY, "data.max_prompt_tokens=512")
    in_turn = plan(RLConfig, "8xH100", *said)
    turns = step_seconds(in_turn)
    at_once = step_seconds(plan(RLConfig, "8xH100", *said, "rollout.max_staleness=1"))
    assert turns["step"] == pytest.approx(sum(turns.values()) / 2)
    assert at_once["step"] < sum(v for k, v in at_once.items() if k != "step")


def test_a_plan_is_plain_data() -> None:
    resolved = plan(RLConfig, "8xH100", *ON_RAY)
    found = report_of(resolved.said, resolved)
    assert json.loads(json.dumps(found)) == found
    assert found["layout"]["system.vllm.tensor_parallel_size"] == {"value": 2, "reason": "given"}
    assert [device["device"] for device in found["memory"]] == ["trainer", "engine"]


def test_a_model_without_sizes_is_planned_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    resolved = plan(SFTConfig, "8xH100", "model.path=org/unknown")
    found = report_of(resolved.said, resolved)
    assert found["memory"] == [] and found["seconds"] == {} and "org/unknown" in found["notes"][0]


def test_the_plan_says_what_limits_it_and_what_else_there_is() -> None:
    config = load_config(
        SFTConfig, None, ["model.path=7b", "data.train=org/data", "train.steps=100"]
    )
    resolved = plan_run(config, "8xA100-80GB")
    found = report_of(config, resolved, 2.0)
    step = found["seconds"]["step"]
    first, *others = found["limits"]
    assert first["limit"] == "the GPUs' arithmetic" and first["times"] == pytest.approx(
        step / first["step"]
    )
    training = found["seconds"]["training"]
    assert first["step"] == pytest.approx(step - training / 2)
    assert {"the links between GPUs", "the GPUs' memory"} >= {each["limit"] for each in others}
    assert len(found["next_best"]) == 3 and all(
        each["layout"] and each["share"] <= 1 for each in found["next_best"]
    )
    for each in found["next_best"]:
        said = [f"{key}={json.dumps(value)}" for key, value in each["layout"].items()]
        there = plan(SFTConfig, "8xA100-80GB", "train.steps=100", *said)
        assert step_seconds(there)["step"] == pytest.approx(each["step"])
    assert found["cost"]["step"] == pytest.approx(8 * 2.0 * step / 3600)
    assert found["cost"]["run"] == pytest.approx(100 * found["cost"]["step"])


def test_what_is_given_stays_in_the_next_best_layouts() -> None:
    said = [
        "model.path=7b",
        "data.train=org/data",
        "system.zero_stage=3",
        "system.gradient_checkpointing=true",
    ]
    config = load_config(SFTConfig, None, said)
    found = report_of(config, plan_run(config, "8xA100-80GB"))
    assert "cost" not in found
    assert not any(
        {"system.zero_stage", "system.gradient_checkpointing"} & each["layout"].keys()
        for each in found["next_best"]
    )


def test_twice_the_memory_ends_what_memory_takes() -> None:
    """On a single H200 a part of the layers is computed again."""
    config = load_config(SFTConfig, None, ["model.path=7b", "data.train=org/data"])
    resolved = plan_run(config, "H200")
    assert resolved.settings["system.gradient_checkpointing"]
    memory = next(
        each
        for each in report_of(config, resolved)["limits"]
        if each["limit"] == "the GPUs' memory"
    )
    without = plan(
        SFTConfig, "H200", "system.gradient_checkpointing=false", 'system.device_memory="400GB"'
    )
    assert memory["step"] == pytest.approx(step_seconds(without)["step"], rel=0.02)


def test_more_memory_than_was_found_has_room_for_an_engine_s_keys_and_values() -> None:
    """An engine with a GPU of its own takes all of it."""
    rollout = ["prompts_per_step=128", "max_new_tokens=8192", "max_staleness=1"]
    said = [f"rollout.{each}" for each in rollout]
    more = plan(RLConfig, "2xA100-80GB", *said, 'system.device_memory="170GB"')
    assert parse_size(more.settings["system.kv_memory"]) > 80 * 10**9


def test_an_optimizer_step_on_the_host_takes_time() -> None:
    said = ("lora.rank=16", "system.offload_optimizer=true", "system.offload_activations=false")
    said += ("system.offload_parameters=false",)
    found = plan(SFTConfig, "H200", *said)
    host = planned(found).host
    assert step_seconds(found)["optimizer step on the host"] == pytest.approx(
        host * (28 / 16 / 25e9 + 6 / 16 / 20e9)
    )


def test_a_price_needs_gpus_whose_speed_is_known() -> None:
    done = CliRunner().invoke(app, ["plan", "run.toml", "--on", "8xH100-80GB", "--price", "2.5"])
    assert (
        done.exit_code == 0
        and "cost of a step" in done.output
        and "the next best layouts" in done.output
    )
    done = CliRunner().invoke(
        app,
        [
            "plan",
            "run.toml",
            "--on",
            "H200",
            "model.dtype=float32",
            "lora.rank=8",
            "--price",
            "2.5",
        ],
    )
    assert done.exit_code == 2 and "--price" in done.output


@pytest.mark.parametrize(
    ("kind", "said", "longest"),
    [
        (RMConfig, (), 2047),  # a token is predicted after each sample
        (SFTConfig, (), 2048),
        (SFTConfig, ("system.max_tokens_per_microbatch=1024",), 1024),
        (RLConfig, ("rollout.max_new_tokens=1500",), 548),
    ],
)
def test_the_length_assumed_fits_what_limits_sequences(
    folder: Path, kind: type[RunConfig], said: tuple[str, ...], longest: int
) -> None:
    (folder / "7b/config.json").write_text(json.dumps(QWEN_7B | {"max_position_embeddings": 2048}))
    assert plan(kind, "8xA100-80GB", *said).facts.longest == longest


@pytest.mark.parametrize(("share", "named"), [("0.5", True), ("false", True), ("true", False)])
def test_what_fits_fits_with_what_was_said(share: str, named: bool) -> None:
    said = f"system.gradient_checkpointing={share}"
    with pytest.raises(CapacityError) as refused:
        plan(SFTConfig, "H200", said, "system.max_tokens_per_microbatch=2048", "model.path=72b")
    assert ("system.gradient_checkpointing = true" in str(refused.value)) == named


def test_the_memory_of_a_gpu_that_is_not_listed_has_to_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"system\.device_memory"):
        plan(SFTConfig, "this", "system.device=cuda")
    resolved = plan(SFTConfig, "this", "system.device=cuda", "system.device_memory=200GB")
    assert resolved.settings["model.dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("on", "said", "place"),
    [
        ("8xH200-141GB", (), "gpu"),
        pytest.param(
            "4x8xH100-80GB",
            (
                "model.path=72b",
                'system.cluster="ray"',
                'system.engine="vllm"',
                "system.trainer_ranks=24",
            ),
            "host",
            marks=pytest.mark.slow,
        ),
        ("2xH100-80GB", ("system.trainer_ranks=1", 'system.device_memory="41GB"'), "host"),
    ],
)
def test_what_nccl_sends_is_copied_on_the_gpu_where_that_has_room(
    on: str, said: tuple[str, ...], place: str
) -> None:
    given = ('system.weight_plane="nccl"', "rollout.max_staleness=1", *said)
    resolved = plan(RLConfig, on, *given)
    devices = {name: (planned, free) for name, planned, free in planned_devices(resolved)}
    embedding = 2 * resolved.facts.model.vocab_size * resolved.facts.model.hidden_size
    ranks = resolved.devices.publishing_ranks
    whole = 2 * resolved.facts.model.parameters
    shared = whole if ranks == 1 else whole // ranks + 2 * embedding
    assert resolved.settings["system.weight_copy"] == place
    assert devices["trainer"][0].published == (shared if place == "gpu" else 2 * embedding)
    assert devices["engine"][0].published == 3 * embedding
    assert devices["trainer"][0].peak <= devices["trainer"][1]
    if place == "host":
        said_so = plan(RLConfig, on, *given, 'system.weight_copy="gpu"')
        assert said_so.devices.weight_copy == "gpu", "something else goes to the host instead"


def test_weights_that_are_in_host_memory_are_sent_from_there() -> None:
    given = ("system.offload_parameters=true", "system.zero_stage=3", "rollout.max_staleness=1")
    resolved = plan(RLConfig, "8xH200-141GB", *given)
    assert resolved.settings["system.weight_plane"] == "nccl"
    assert resolved.settings["system.weight_copy"] == "host"


def test_an_adapter_alone_takes_no_embedding_to_send() -> None:
    said = (
        "lora.rank=8",
        'system.weight_plane="nccl"',
        "rollout.max_staleness=1",
        "system.trainer_ranks=1",
    )
    said += ("system.engine=local",)
    resolved = plan(RLConfig, "2xH100-80GB", *said)
    devices = {name: planned for name, planned, _ in planned_devices(resolved)}
    assert devices["trainer"].published == 4 * adapter_numbers(resolved.facts.model, 8)
    assert devices["engine"].published == 3 * (64 << 20)


def test_a_setting_that_excludes_a_much_faster_layout_is_named() -> None:
    """Compiled layers are sharded like others, so they exclude none."""
    away, compiled, plain = (
        plan(SFTConfig, "8xH100-80GB", f"system.{said}")
        for said in ("offload_optimizer=true", 'compile="default"', "zero_stage=3")
    )
    key = "system.offload_optimizer = "
    assert sum(key in note and " s without it" in note for note in away.notes) == 1
    for each in (compiled, plain):
        assert each.devices.zero_stage and not any("without it" in note for note in each.notes)


@pytest.mark.more
def test_a_share_of_memory_for_vllm_is_planned() -> None:
    said = ("system.engine=vllm", "system.hybrid=true", "system.vllm.memory_share=0.5")
    found = plan(RLConfig, "8xA100-80GB", *said)
    [(_, needed, _)] = planned_devices(found)
    total = found.facts.hardware.gpus[0].memory_total
    engine = needed.engine + needed.kv + LIBRARIES_WITH_NCCL
    assert engine == pytest.approx(total / 2, rel=1e-3)
    with pytest.raises(CapacityError) as error:
        plan(RLConfig, "8xA100-80GB", *said[:2], "system.vllm.memory_share=0.95")
    assert "system.vllm.memory_share = 0.75" in str(error.value)


@pytest.mark.slow
def test_a_machine_that_is_named_is_planned_with_vllm() -> None:
    large = plan(RLConfig, "8x8xH100-80GB", "model.path=72b", "system.cluster=ray")
    assert large.settings["system.engine"] == "vllm" and "system.engine" not in large.given
    assert any("system.engine" in note for note in large.notes)
    for said in (("system.engine=local",), ("lora.rank=8", "model.quantize=int8")):
        own = plan(RLConfig, "8xH100-80GB", *said)
        assert own.settings["system.engine"] == "local" and not any(
            "system.engine" in note for note in own.notes
        )


def test_an_adapter_on_another_base_than_its_own_is_noted(tmp_path: Path) -> None:
    for name in ("one", "other", "adapter"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "adapter_config.json", "adapter_model.safetensors"):
            if ("adapter" in file) == (name == "adapter"):
                (tmp_path / name / file).write_text("{}")
    (tmp_path / "x.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    gone = str(tmp_path / "gone")
    cases = {
        (one, one): False, (one, str(tmp_path / "link")): False, (one, other): True,
        (gone, one): False, (None, one): False, ("org/Model", "org/model"): False,
        ("org/Model", "org/other"): True, ("org/Model", one): False, (one, "org/model"): False,
    }  # fmt: skip
    for (base, model), differs in cases.items():
        assert SavedAdapter(4, None, base).other_base(model) == differs, (base, model)
        said = ["train.steps=1", f"data.train={tmp_path / 'x.jsonl'}", f"model.path={model}"]
        said.append(f"lora.path={tmp_path / 'adapter'}")
        facts = Facts(CPU, adapter=SavedAdapter(4, None, base))
        found = resolve(load_config(SFTConfig, None, said), facts)
        assert any("lora.path" in note for note in found.notes) == differs
