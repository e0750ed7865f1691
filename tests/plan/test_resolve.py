"""What is derived, from which facts and why; and which settings contradict each other."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.machine_facts import CPU, GB, SMALL, facts
from tunesmith.config.changing import with_values
from tunesmith.config.commands import (
    DistillConfig,
    GenerateConfig,
    OfflineDistillConfig,
    RFTConfig,
    all_keys,
)
from tunesmith.config.load import load_config
from tunesmith.config.resolved import config_text, print_resolved, save_resolved
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import ConfigError, ModelError, StorageError
from tunesmith.plan.cost.memory import planned
from tunesmith.plan.facts import hardware
from tunesmith.plan.facts.hardware import Gpu, Hardware, parse_gpus, read_hardware
from tunesmith.plan.facts.model import ModelFacts, read_model_facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import check
from tunesmith.plan.rules.rule import UNREAD

OLD_CPU = Hardware("an old CPU", cores=4, memory_total=16 * GB, memory_available=8 * GB, bf16=False)
H100 = Gpu("H100", 80 * GB, 79 * GB, (9, 0))
V100 = Gpu("V100", 32 * GB, 31 * GB, (7, 0))


def rl(*overrides: str) -> RLConfig:
    base = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    return load_config(RLConfig, None, [*base, *overrides])


def sft(*overrides: str) -> SFTConfig:
    return load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", *overrides])


def derived(resolved: AnyPlan, key: str) -> tuple[Any, str]:
    found = [d for d in resolved.reasons if d.key == key]
    assert len(found) == 1, key
    return found[0].value, found[0].reason


def test_steps_come_from_the_data_and_the_batch() -> None:
    resolved = resolve(rl("train.epochs=2", "rollout.prompts_per_step=16"), facts())
    assert derived(resolved, "train.steps") == (125, "2 passes over 1000 prompts, 16 to a step")
    assert resolved.settings["train.steps"] == 125
    assert derived(resolved, "train.batch_size")[0] == 16 * 8
    assert resolve(sft(), facts(train_size=65)).settings["train.steps"] == 3, "ceil(65 / 32)"
    small = resolve(sft(), facts(train_size=5))
    assert derived(small, "train.batch_size") == (5, "all of the data")
    assert resolve(sft("train.steps=7"), facts()).settings["train.steps"] == 7
    unknown = resolve(rl(), facts(train_size=None))
    assert unknown.settings["train.steps"] is None, "not known yet"
    assert unknown.training.steps is None and unknown.said.train.steps is None


def test_warmup_ratio_counts_optimizer_steps() -> None:
    config = rl(
        "train.steps=10",
        "train.batch_size=32",
        "train.passes_per_batch=2",
        "train.warmup_ratio=0.1",
    )
    resolved = resolve(config, facts())
    assert derived(resolved, "train.warmup_steps") == (4, "0.1 of 40 optimizer steps")


def test_learning_rate_falls_with_the_size_of_the_model() -> None:
    def lr(config: RunConfig, parameters: int | None) -> float:
        model = ModelFacts(parameters, 6, 256, 768, 4, 2, 64, 4096, 4096)
        roomy = Hardware("c", 4, 1000 * GB, 1000 * GB, bf16=False)
        value, reason = derived(resolve(config, facts(model=model, hardware=roomy)), "train.lr")
        assert reason
        return value

    assert lr(sft(), 100_000_000) == lr(sft(), 7 * GB) == 2e-5
    assert lr(sft(), 10_000_000) == pytest.approx(2e-4)
    assert lr(sft(), 1000) == 1e-3
    assert lr(rl(), 7 * GB) == lr(rl(), None) == 1e-6
    assert lr(rl(), 5_000_000) == pytest.approx(1e-4)
    assert lr(rl(), 1000) == 3e-4
    assert resolve(rl("train.lr=0.5"), facts()).settings["train.lr"] == 0.5


@pytest.mark.parametrize(
    ("hardware", "overrides", "device", "dtype"),
    [
        (CPU, [], "cpu", "bfloat16"),
        (OLD_CPU, [], "cpu", "float32"),
        (Hardware("c", 4, 16 * GB, 8 * GB, False, (H100,)), [], "cuda", "bfloat16"),
        (Hardware("c", 4, 16 * GB, 8 * GB, True, (V100,)), [], "cuda", "float16"),
        (
            Hardware("c", 4, 16 * GB, 8 * GB, True, (V100, H100)),
            ["system.device=cuda:1"],
            "cuda:1",
            "bfloat16",
        ),
        (
            Hardware("c", 4, 16 * GB, 8 * GB, True, (V100,)),
            ["system.device=cpu"],
            "cpu",
            "bfloat16",
        ),
        (CPU, ["model.dtype=float32"], "cpu", "float32"),
    ],
)
def test_device_and_number_format(
    hardware: Hardware, overrides: list[str], device: str, dtype: str
) -> None:
    config = resolve(rl(*overrides), facts(hardware=hardware))
    assert (config.settings["system.device"], config.settings["model.dtype"]) == (device, dtype)


def test_micro_batches_follow_the_memory_and_always_hold_the_longest_sample() -> None:
    def tokens(config: RunConfig, available: int, **changes: Any) -> int | None:
        machine = Hardware("c", 4, available, available, bf16=False)
        return resolve(config, facts(hardware=machine, **changes)).settings[
            "system.max_tokens_per_microbatch"
        ]

    # Per token: 6 layers × (8·256 + 4·256 + 4·768) numbers × 4 bytes; half of what the state leaves
    # free, and the head: the gradient of 100 rows of 4096 logits, and three times a gradient of
    # 4096 × 256.
    layer = 4 * (4 * 256 + 3 * 256 + 3 * 128 + 3 * 768) + 4 * (
        2 + 4
    )  # saved in it, then needed by its backward pass
    per_token = 6 * layer + 2 * 4 * 256 + 5 * 4 * 768 + 2 * 4 * 256
    state = 16 * 5_000_000 + 4 * 100 * 256 + 4 * 4096 * (100 + 3 * 256)
    assert tokens(sft(), state + 2 * per_token * 1024) == 1024
    assert tokens(sft(), state + 2 * per_token * 1300) == 1280
    assert tokens(sft(), 8 * GB) == 2048
    assert tokens(sft(), state + 2 * per_token * 1024, longest=1500) >= 1500, "of some layers again"
    whole = "system.gradient_checkpointing=false"
    assert tokens(sft(whole), state + 2 * per_token * 1024, longest=1500) == 1500
    prepared = 8 * 5_000_000
    assert tokens(rl(whole), state + prepared + 3 * per_token * 256, longest=100) == 612
    checkpointed = tokens(sft("system.gradient_checkpointing=true"), state + 2 * per_token * 1024)
    assert checkpointed is not None and checkpointed > 1024
    assert tokens(sft("system.max_tokens_per_microbatch=500"), 8 * GB) == 500


@pytest.mark.parametrize(("parameters", "together"), [(5_000_000, 64), (400_000_000, 32)])
def test_on_a_cpu_fewer_completions_are_sampled_at_once_so_that_the_first_end_early(
    parameters: int, together: int
) -> None:
    base = ["model.path=org/m", "data.train=org/d"]
    config = load_config(GenerateConfig, None, base)
    model = replace(SMALL, parameters=parameters)
    assert derived(resolve(config, facts(model=model)), "system.max_running")[0] == together
    given = resolve(
        load_config(GenerateConfig, None, [*base, "system.max_running=9"]), facts(model=model)
    )
    assert given.settings["system.max_running"] == 9
    assert "system.max_running" not in {each.key for each in given.reasons}


def test_sampler_memory_is_what_the_batch_needs_or_its_share() -> None:
    resolved = resolve(rl(), facts())
    # 64 requests of 100 + 512 tokens and two blocks of 32; 2 · 6 layers · 2 heads · 64 numbers of 4
    # bytes per token, in bfloat16 too, as the local engine has them on a CPU without a compiler; a
    # tenth more.
    wanted = 64 * (612 + 64) * 2 * 6 * 2 * 64 * 4
    assert resolved.settings["model.dtype"] == "bfloat16"
    assert derived(resolved, "system.kv_memory")[0] == f"{-(-wanted * 11 // 10**7)}MB"
    tight = resolve(
        rl("rollout.group_size=256", "rollout.max_new_tokens=3000", "system.max_running=2048"),
        facts(),
    )
    value, reason = derived(tight, "system.kv_memory")
    # Of the head: gradients of 3100 rows, of a tile of 512 × 4096 logits, and of its weights, in
    # three tensors.
    head = 4 * 3100 * 256 + (4 + 2) * 512 * 4096 + (2 * 4 + 2) * 4096 * 256
    assert value == f"{-(-(8 * GB - (18 + 8) * 5_000_000 - head) // 4 // 10**6)}MB"
    assert reason.startswith("a quarter of the free memory")


def test_state_counts_the_teacher_in_place_of_a_reference() -> None:
    """18 bytes of each trained number, and 2 of each frozen one in bfloat16."""
    base = ["model.path=org/m", "data.train=org/d"]
    for config, frozen, expected in (
        (rl(), 0, 18 * 5),
        (rl("algorithm.kl.coef=0.1"), 0, 18 * 5 + 2 * 5),
        (load_config(DistillConfig, None, [*base, "teacher.path=org/t"]), 7, 18 * 5 + 2 * 7),
        (load_config(OfflineDistillConfig, None, [*base, "teacher.path=org/t"]), 7, 18 * 5 + 2 * 7),
    ):
        known = facts(frozen_parameters=frozen * 1_000_000)
        found = planned(resolve(config, known))
        assert found is not None and found.state == expected * 1_000_000


def test_intervals_longer_than_the_run_are_shortened_and_it_says_so() -> None:
    resolved = resolve(
        rl(
            "train.steps=20",
            "checkpoint.every=500",
            "data.eval=org/e",
            "eval.every=50",
            "monitor.every=7",
        ),
        facts(),
    )
    assert derived(resolved, "checkpoint.every") == (20, "shortened from 500: the run has 20 steps")
    assert derived(resolved, "eval.every")[0] == 20
    assert resolved.settings["monitor.every"] == 7
    assert derived(resolve(rl("train.steps=20"), facts()), "checkpoint.every") == (20, "at the end")


def test_limits_come_from_the_models_context() -> None:
    assert resolve(rl(), facts()).settings["data.max_prompt_tokens"] == 2048 - 512
    assert resolve(sft(), facts()).settings["data.max_tokens"] == 2048
    rft = load_config(
        RFTConfig, None, ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    )
    assert resolve(rft, facts()).settings["data.max_tokens"] is None, (
        "its prompts leave room for an answer"
    )
    assert resolve(rl("data.eval=org/e", "eval.samples=8"), facts()).settings["eval.pass_at"] == [
        1,
        2,
        4,
        8,
    ]


@pytest.mark.parametrize(
    "config", [rl("data.eval=org/d", "eval.samples=4", "train.warmup_ratio=0.1"), sft()]
)
def test_what_was_said_is_not_changed(config: RunConfig) -> None:
    before = config.model_dump()
    once = resolve(config, facts())
    assert once.said is config and config.model_dump() == before
    assert resolve(once.said, facts()) == once


@pytest.mark.parametrize(
    ("config", "kind", "keys"),
    [
        (
            rl("rollout.group_size=1"),
            "contradiction",
            ["algorithm.advantage", "rollout.group_size"],
        ),
        (
            rl("rollout.group_size=1", "algorithm.name=rloo"),
            "contradiction",
            ["algorithm.advantage"],
        ),
        (
            rl("rollout.group_size=1", "algorithm.name=dr_grpo"),
            "contradiction",
            ["algorithm.advantage"],
        ),
        (
            rl("rollout.group_size=1", "algorithm.name=dapo"),
            "contradiction",
            ["algorithm.advantage"],
        ),
        (
            rl("train.steps=10", "train.warmup_steps=11"),
            "contradiction",
            ["train.warmup_steps", "train.steps"],
        ),
        (sft("train.steps=10", "train.warmup_steps=11"), "contradiction", ["train.warmup_steps"]),
        (
            rl("train.warmup_steps=1", "train.warmup_ratio=0.1"),
            "contradiction",
            ["train.warmup_ratio"],
        ),
        (rl("train.steps=1", "train.epochs=1"), "contradiction", ["train.steps", "train.epochs"]),
        (sft("train.min_lr_ratio=0.1"), "unread", ["train.min_lr_ratio"]),
        (rl("eval.every=5"), "unread", ["eval.every"]),
        (rl("data.eval=org/d", "eval.temperature=0.5"), "unread", ["eval.temperature"]),
        (
            rl("data.eval=org/d", "eval.samples=4", "eval.pass_at=[1,8]"),
            "contradiction",
            ["eval.pass_at"],
        ),
        (rl("rollout.temperature=0"), "contradiction", ["rollout.temperature"]),
        (rl("train.batch_size=20"), "contradiction", ["train.batch_size", "rollout.group_size"]),
        (rl("train.batch_size=100"), "contradiction", ["train.batch_size"]),
        (
            rl("system.max_tokens_per_microbatch=100"),
            "contradiction",
            ["system.max_tokens_per_microbatch"],
        ),
        (rl("algorithm.overlong.buffer=600"), "contradiction", ["algorithm.overlong.buffer"]),
        (
            rl("algorithm.name=reinforce", "algorithm.dynamic_filter=true", "rollout.group_size=1"),
            "contradiction",
            ["algorithm.dynamic_filter", "rollout.group_size"],
        ),
        (rl("checkpoint.resume=true"), "contradiction", ["checkpoint.resume"]),
        (sft("train.passes_per_batch=2"), "unread", ["train.passes_per_batch"]),
        (sft("system.kv_memory=1GB"), "unread", ["system.kv_memory"]),
        (
            sft("data.max_tokens=500", "system.max_tokens_per_microbatch=400"),
            "contradiction",
            ["system.max_tokens_per_microbatch", "data.max_tokens"],
        ),
    ],
)
def test_contradictions_are_refused_before_any_fact_is_known(
    config: RunConfig, kind: str, keys: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert [p for p in caught.value.problems if p.kind == kind and {*keys} <= {*p.keys}]


def test_batch_sizes_that_would_do_are_named() -> None:
    for size, near in ((20, "use 16 or 32"), (100, "use 64, or leave it out")):
        with pytest.raises(ConfigError, match=near):
            check(rl(f"train.batch_size={size}"))


@pytest.mark.parametrize(
    "config",
    [sft("data.max_tokens=3000"), rl("data.max_prompt_tokens=3000", "rollout.max_new_tokens=64")],
)
def test_longer_samples_may_be_allowed_than_there_are(config: RunConfig) -> None:
    """The size of a micro-batch is derived by what there is."""
    resolved = resolve(config, facts(longest=30))
    assert resolved.settings["system.max_tokens_per_microbatch"] < 3000
    with pytest.raises(ConfigError, match="hard cap"):
        resolve(with_values(config, {"system.max_tokens_per_microbatch": 25}), facts(longest=30))


def test_what_is_said_to_be_unread_are_settings_that_exist() -> None:
    for entry in UNREAD:
        known = all_keys(entry.kind, tables=True)
        shown = re.findall(r"\{([\w.]+)\}", entry.why)
        assert {*shown, *(key for key in (*entry.keys, *entry.but) if not key.endswith("."))} <= {
            *known
        }
        assert all(
            any(key.startswith(table) for key in known)
            for table in entry.keys
            if table.endswith(".")
        )


def test_all_contradictions_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        check(rl("rollout.group_size=1", "rollout.temperature=0", "eval.every=5"))
    assert str(caught.value).startswith("3 settings do not fit together:\n  ")


@pytest.mark.parametrize(
    ("config", "changes", "told"),
    [
        (rl("train.warmup_steps=200"), {}, "longer than the run of 125 optimizer steps"),
        (rl("rollout.max_new_tokens=4096"), {}, "leaves no room in the model's context of 4096"),
        (rl(), {"longest": 4000}, "the longest prompt has 4000 tokens, and 3584 are allowed"),
        (sft(), {"longest": 5000}, "the longest sample has 5000 tokens, and 4096 are allowed"),
        (sft("system.max_tokens_per_microbatch=99"), {}, "raise it to at least 100"),
        (sft("system.device=gpu"), {}, "system.device = 'gpu' is not a device"),
        (sft("system.device=mps:a"), {}, "system.device = 'mps:a' is not a device"),
        (
            rl("system.device=cuda:first", "system.engine_process=true"),
            {"hardware": Hardware("c", 1, GB, GB, True, (H100, H100))},
            "system.device = 'cuda:first' is not a device",
        ),
        (
            sft("system.device=cuda:3"),
            {"hardware": Hardware("c", 1, GB, GB, True, (H100,))},
            "there are 1 GPUs",
        ),
    ],
)
def test_contradictions_with_the_facts(
    config: RunConfig, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config, facts(**changes))
    assert told in str(caught.value)


def test_notes() -> None:
    notes = resolve(rl("model.dtype=bfloat16"), facts(hardware=OLD_CPU)).notes
    assert any("float32 is faster" in note for note in notes)
    assert resolve(rl(), facts()).notes == ()


def test_what_is_saved_runs_again_and_says_where_each_value_comes_from(tmp_path: Path) -> None:
    source = 'data.train=[{path="org/d", weight=2.0}, "org/e"]'
    config = rl(source, "train.epochs=2", "train.max_grad_norm=0", 'data.system_prompt=Say "hi"\\n')
    resolved = resolve(config, facts())
    save_resolved(resolved.listing, tmp_path)
    again = load_config(RLConfig, tmp_path / "config.toml", [])
    assert again == config
    assert resolve(again, facts()) == resolved
    saved = json.loads((tmp_path / "resolved.json").read_text())["settings"]
    assert saved["train.max_grad_norm"] == {"value": 0.0, "source": "said"}
    assert saved["train.steps"]["source"] == "derived"
    assert "2 passes" in saved["train.steps"]["reason"]
    assert saved["rollout.group_size"] == {"value": 8, "source": "default"}
    assert "# steps = 250  # 2 passes over 1000 prompts, 8 to a step" in config_text(
        resolved.given, resolved.reasons
    )


def test_a_resumed_run_keeps_what_the_earlier_one_said(tmp_path: Path) -> None:
    for steps in (10, 10, 20, 30):
        save_resolved(resolve(rl(f"train.steps={steps}"), facts()).listing, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config-1.toml", "config-2.toml", "config.toml", "resolved.json",
    ]  # fmt: skip
    assert "steps = 20" in (tmp_path / "config-2.toml").read_text()


@pytest.mark.parametrize(
    ("said", "trainer", "engine", "reason"),
    [
        ((), 8, 8, "may use"),
        (("system.engine_process=true", "system.engines=2"), 8, 4, "may use"),
        (
            ("system.engine_process=true", "system.engines=3", "rollout.max_staleness=1"), 2, 2,
            "shared by the trainer and 3 engine processes",
        ),
        (("system.engine_process=true", "rollout.max_staleness=1", "system.threads=6"), 6, 6, ""),
    ],
)  # fmt: skip
def test_who_computes_at_once_shares_the_cores(
    said: tuple[str, ...], trainer: int, engine: int, reason: str
) -> None:
    machine = replace(facts().hardware, cores=8, gpus=())
    resolved = resolve(rl(*said), replace(facts(), hardware=machine))
    assert (
        resolved.settings["system.threads"] == trainer and resolved.devices.engine_threads == engine
    )
    assert all(d.reason.endswith(reason) for d in resolved.reasons if d.key == "system.threads")


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        save_resolved(resolve(rl(), facts()).listing, tmp_path / "gone")


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    made = resolve(rl("rollout.top_p=0.9", "rollout.prompts_per_step=8"), facts(train_size=5))
    print_resolved(made.listing, all_of_it=False)
    shown = capsys.readouterr().out
    assert "rollout.top_p" in shown and "as you said" in shown
    assert "one pass over 5 prompts, 5 to a step" in shown
    assert "algorithm.decoupled" in shown and "rollout.top_p alters" in shown
    assert "lowered from 8: the data has 5 prompts" in shown
    rows = {line.split()[0] for line in shown.splitlines()}
    off = {d.key for d in made.reasons if d.value in (None, False, 0, "none")}
    assert off and not off & rows and {d.key for d in made.reasons} - off <= rows
    assert f"{len(off)} more are off" in shown and "-v" in shown
    print_resolved(made.listing, all_of_it=True)
    everything = capsys.readouterr().out
    assert {d.key for d in made.reasons} <= {line.split()[0] for line in everything.splitlines()}


def test_a_said_value_is_shown_though_it_switches_something_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_resolved(
        resolve(rl("train.seed=0", "system.compile=false"), facts()).listing, all_of_it=False
    )
    rows = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"train.seed", "system.compile"} <= rows


def test_model_facts_without_torch(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    shapes = {"a": (3, 4), "b": (5,), "c": ()}
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_model_facts(tmp_path) == ModelFacts(
        3 * 4 + 5 + 1, 2, 32, 64, 4, 2, 8, 300, 512, estimated=37792, widths=1024
    )
    for rope in (
        {
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "short_factor": [1.0]},
        },
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64}
            }
        },
    ):
        (tmp_path / "config.json").write_text(json.dumps(sizes | rope))
        model = read_model_facts(tmp_path)
        assert model is not None and model.switch == 64
    (tmp_path / "config.json").write_text(
        '{"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 9}'
    )
    (tmp_path / "model.safetensors").unlink()
    gpt2 = read_model_facts(tmp_path)
    assert gpt2 is not None
    estimated = gpt2.estimated
    assert gpt2 == ModelFacts(None, 2, 32, 128, 4, 4, 8, 9, None, estimated=estimated, widths=1472)
    (tmp_path / "config.json").write_text("{}")
    assert read_model_facts(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
            "a Git LFS pointer",
        ),
        ("model.safetensors", b"<html>no such file</html>", "is damaged"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "cannot read"),
        ("model.safetensors", struct.pack("<Q", 10) + b'{"a": {}} ', "cannot read"),
        ("config.json", b"[]", "cannot read"),
    ],
)
def test_files_that_are_no_model_are_refused_in_words(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / "config.json").write_text(
        '{"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 9}'
    )
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"cannot read .*{name}") as caught:
        read_model_facts(tmp_path)
    assert told in str(caught.value)


def test_limits_of_the_groups_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's scheduler or systemd limits a group below the root; the least of them counts."""
    own = tmp_path / "self"
    monkeypatch.setattr(hardware, "_GROUPS", tmp_path)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", own)
    files = {
        "slurm/job/memory.max": 3 * 10**9,
        "slurm/job/memory.current": 10**9,
        "slurm/memory.max": 2 * 10**9,
        "slurm/memory.current": 10**9,
        "slurm/memory.stat": "anon 1\ninactive_file 400000000",
        "memory.max": "max",
        "slurm/cpu.max": "150000 100000",
        "slurm/job/cpu.max": "max 100000",
        "other/memory.max": 1,
        "memory/old/memory.limit_in_bytes": 5 * 10**8,
        "cpu/old/cpu.cfs_quota_us": 100000,
        "cpu/old/cpu.cfs_period_us": 100000,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    own.write_text("0::/slurm/job\n")
    assert hardware.memory()[0] == 2 * 10**9 and hardware.memory()[1] <= 14 * 10**8
    assert hardware.usable_cpus() == 1
    own.write_text("4:memory:/old\n1:cpu,cpuacct:/old\n0::/\n")
    assert (
        hardware.memory() == (5 * 10**8, min(5 * 10**8, hardware.memory()[1]))
        and hardware.usable_cpus() == 1
    )
    own.write_text("0::/../job\n")
    assert hardware.memory()[0] > 3 * 10**9


def test_gpu_listing() -> None:
    listing = (
        "0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 80000, 9.0\n"
        "1, GPU-bb22, Tesla V100, 32768, 32000, 7.0\n"
        "2, GPU-cc33, Odd One, [N/A], [N/A], 8.0\n"
    )
    both = parse_gpus(listing, None)
    assert [g.name for g in both] == ["NVIDIA H100 80GB HBM3", "Tesla V100"]
    assert [g.bf16 for g in both] == [True, False]
    assert both[0].memory_total == 81559 * 2**20
    assert [g.name for g in parse_gpus(listing, "1,0")] == ["Tesla V100", "NVIDIA H100 80GB HBM3"]
    assert [g.name for g in parse_gpus(listing, "GPU-bb")] == ["Tesla V100"]
    assert parse_gpus(listing, "7,0") == (), "CUDA stops at the first it does not know"
    assert [g.name for g in parse_gpus(listing, "0,")] == ["NVIDIA H100 80GB HBM3"]


def test_parts_of_a_gpu_have_their_own_memory() -> None:
    listing = "0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 80000, 9.0\n"
    parts = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-c7)\n"
        "  MIG 1g.10gb+me  Device  1: (UUID: MIG-d8)\n"
    )
    [part] = parse_gpus(listing, "MIG-d8", parts)
    assert part == Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 10 * GB, 10 * GB, (9, 0))
    assert [g.memory_free for g in parse_gpus(listing, "MIG-c7,MIG-d8", parts)] == [
        40 * GB,
        10 * GB,
    ]
    assert parse_gpus(listing, "MIG-e9", parts) == parse_gpus(listing, "MIG-c7") == ()
    assert len(parse_gpus(listing, None, parts)) == 1


def test_of_a_divided_gpu_cuda_sees_the_first_part() -> None:
    """In a container that has one part, its GPU's memory may be withheld."""
    divided = "0, GPU-aa11, NVIDIA A100, 40960, 40000, 8.0, Enabled\n"
    withheld = divided.replace("40960, 40000", "[Insufficient Permissions], [N/A]")
    whole = "1, GPU-bb22, NVIDIA L4, 23034, 22500, 8.9, [N/A]\n"
    parts = (
        "GPU 0: NVIDIA A100 (UUID: GPU-aa11)\n"
        "  MIG 2g.10gb     Device  0: (UUID: MIG-c7)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-d8)\n"
        "GPU 1: NVIDIA L4 (UUID: GPU-bb22)\n"
    )
    part = Gpu("NVIDIA A100 MIG 2g.10gb", 10 * GB, 10 * GB, (8, 0))
    for listing in (divided, withheld):
        for visible in (None, "0", "GPU-aa11", "MIG-c7"):
            assert parse_gpus(listing, visible, parts) == (part,)
        assert [g.name for g in parse_gpus(listing + whole, None, parts)] == ["NVIDIA L4"]
        assert [g.name for g in parse_gpus(listing + whole, "1,0", parts)] == [
            "NVIDIA L4",
            part.name,
        ]
        assert parse_gpus(listing, None) == (), "it has no parts yet"


def test_a_gpu_without_memory_of_its_own_takes_most_of_the_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = "0, GPU-aa11, NVIDIA GB10, [N/A], [N/A], 12.1, [N/A]\n"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tunesmith.plan.facts.hardware.nvidia_smi", lambda *_: listing)
    monkeypatch.setattr("tunesmith.plan.facts.hardware.memory", lambda: (128 * GB, 100 * GB))
    found = read_hardware()
    assert found.gpus == (Gpu("NVIDIA GB10", 102_400_000_000, 80 * GB, (12, 1)),)
    assert found.memory_available == 20 * GB, "and leaves the rest to the CPU"


def test_a_gpu_that_cannot_be_found_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tunesmith.plan.facts.hardware.read_gpus", lambda *_: ())
    for visible, unseen in (("MIG-c7", "CUDA_VISIBLE_DEVICES is MIG-c7"), ("-1", None), ("", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert read_hardware().unseen == unseen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for place, unseen in ((tmp_path, f"there is {tmp_path}"), (tmp_path / "none", None)):
        monkeypatch.setattr("tunesmith.plan.facts.hardware.DRIVER", place)
        assert read_hardware().unseen == unseen
    notes = resolve(rl(), facts(hardware=replace(CPU, unseen="MIG-c7"))).notes
    assert [note for note in notes if "MIG-c7" in note and "system.device_memory" in note]
    for said, machine in (([], CPU), (["system.device=cpu"], replace(CPU, unseen="MIG-c7"))):
        notes = resolve(rl(*said), facts(hardware=machine)).notes
        assert not any("CUDA_VISIBLE_DEVICES" in note for note in notes)


def test_this_machine() -> None:
    machine = read_hardware()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.memory_available <= machine.memory_total


def test_an_address_space_limit_counts() -> None:
    import subprocess
    import sys

    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from tunesmith.plan.facts.hardware import read_hardware; h = read_hardware();"
        "assert h.memory_total <= 2**30 and h.memory_available < 2**30, h"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_limits_are_measured_once() -> None:
    from tunesmith.run.trainers.limits import measure_limits

    limits = measure_limits("cpu", "float32")
    assert limits.flops_per_second > 1e8 and limits.bytes_per_second > 1e8
    assert measure_limits("cpu", "float32") is limits


@pytest.mark.parametrize("terminal", [True, False])
def test_keys_values_and_reasons_are_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    """Below the value where 80 columns do not hold both; in a file on one line, without blanks at
    its end."""
    import rich.console

    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "models" / ("long" * 12))
    made = resolve(rl("rollout.top_p=0.9", f"run_dir={path}"), facts())
    plain = rich.console.Console
    monkeypatch.setattr(
        rich.console,
        "Console",
        lambda **_: plain(force_terminal=terminal, width=80, color_system=None, file=sys.stdout),
    )
    print_resolved(made.listing, all_of_it=True)
    lines = capsys.readouterr().out.splitlines()
    keys = [line.split()[0] for line in lines if not line.startswith((" ", "note"))]
    assert {d.key for d in made.reasons} <= set(keys)
    text = " ".join(" ".join(lines).split())
    assert all(" ".join(d.reason.split()) in text for d in made.reasons)
    assert str(tmp_path) not in text and "long" * 12 in text
    assert not any(line.endswith(" ") for line in lines)
    if terminal:
        wide = [
            line
            for line in lines
            if len(line) > 80 and "longlong" not in line and not line.startswith("note")
        ]
        assert not wide
    else:
        assert not any(line.startswith("    ") for line in lines)


@pytest.mark.parametrize(("longest", "expected"), [(40, True), (30, False)])
def test_rollouts_that_grow_past_a_switch_of_frequencies_are_scored_anew(
    longest: int, expected: bool
) -> None:
    """What was drawn with the short frequencies is scored with the long ones: the first ratio would
    not be 1."""
    model = ModelFacts(1_000_000, 2, 32, 64, 4, 2, 8, 300, 512, switch=64)
    found = resolve(rl("rollout.max_new_tokens=32"), facts(model=model, longest=longest))
    value, reason = derived(found, "algorithm.decoupled")
    assert value is expected and ("64 tokens" in reason) is expected
    if expected:
        with pytest.raises(ConfigError, match="64 tokens"):
            resolve(
                rl("rollout.max_new_tokens=32", "algorithm.decoupled=false"),
                facts(model=model, longest=longest),
            )


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=dapo", "algorithm.loss.clip_high=0.3"],
        ["algorithm.loss=sapo", "algorithm.dynamic_filter.low=0.1", "algorithm.kl.coef=0.1"],
        ["algorithm.name=ppo", "algorithm.kl=none", "algorithm.overlong=true"],
        ["algorithm.loss=gpg", "algorithm.correction=icepop", "algorithm.correction.high=3.0"],
    ],
)
def test_the_choices_of_a_run_are_written_as_they_were_made(
    tmp_path: Path, overrides: list[str]
) -> None:
    found = resolve(rl(*overrides), facts())
    (tmp_path / "run.toml").write_text(config_text(found.given, found.reasons))
    again = resolve(load_config(RLConfig, tmp_path / "run.toml"), facts())
    assert again.settings == found.settings and again.given == found.given
