"""``tunesmith migrate``: whole sources in the style of each framework, with batches computed by
hand."""

from __future__ import annotations

import json
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.documents import ROOT, blocks_of
from tests.support.migrated_sources import (
    ACCELERATED,
    ASYNC,
    GRPO,
    OLD_PPO,
    OPENRLHF,
    SFT_OPENRLHF,
    SFT_VERL,
    STATESET,
    VERL,
)
from tunesmith.cli.main import app
from tunesmith.config.load import find_kind, load_config
from tunesmith.config.resolved import settings
from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.convert import Migration, convert
from tunesmith.guide.migrate.read import read_source, read_text
from tunesmith.guide.migrate.settle import settle
from tunesmith.guide.migrate.write import account, run_file
from tunesmith.plan.rules.checks import check

PPO = """
from trl import PPOConfig, PPOTrainer
args = PPOConfig(
    per_device_train_batch_size=16, gradient_accumulation_steps=4, num_mini_batches=2, total_episodes=6400,
    num_ppo_epochs=4, kl_coef=0.05, cliprange=0.15, vf_coef=0.2, gamma=0.99, lam=0.9, response_length=64,
)
PPOTrainer(model="org/base", args=args, train_dataset="org/prompts")
"""


def migrated(
    text: str, name: str = "run.sh", devices: int | None = None, **variables: str
) -> Migration:
    """The migration of the one program in a source, whose run file loads and is checked."""
    [launch] = read_text(textwrap.dedent(text), Path(name), variables)
    migration = convert(replace(launch, devices=devices) if devices else launch)
    for problem in settle(migration):
        assert problem.kind == "machine", problem
    assert len(migration.rows) == len(launch.settings), "every setting is accounted for"
    return migration


def values(migration: Migration, tmp_path: Path) -> dict[str, Any]:
    """The settings of its run file, read back."""
    file = tmp_path / "run.toml"
    file.write_text(run_file(migration, "source"))
    config = load_config(find_kind(file), file, files=False)
    assert config.command == migration.command
    return settings(config, given_only=True)


def row_of(migration: Migration, text: str) -> Any:
    [row] = [row for row in migration.rows if text in row.given.text]
    return row


def test_an_openrlhf_script_with_old_flags(tmp_path: Path) -> None:
    migration = migrated(OPENRLHF)
    run = values(migration, tmp_path)
    assert run["rollout.prompts_per_step"] == 256
    assert run["rollout.group_size"] == 4
    assert (
        run["train.batch_size"] == 128
    )  # completions per optimizer step: 8 steps of the 1024 completions
    assert run["train.passes_per_batch"] == 1 and run["train.epochs"] == 2
    assert (run["data.max_prompt_tokens"], run["rollout.max_new_tokens"]) == (1024, 512)
    assert run["algorithm.name"] == "ppo" and run["algorithm.advantage.gae_lambda"] == 0.95
    assert (run["algorithm.kl"], run["algorithm.kl.coef"]) == ("reward", 0.02)
    assert (run["train.lr"], run["critic.lr"]) == (5e-7, 9e-6)
    assert run["model.dtype"] == "bfloat16" and run["data.train"] == "org/prompts"
    assert run["reward.remote"][0]["urls"] == ["http://127.0.0.1:5000/get_reward"]
    assert run["reward.remote"][0]["protocol"] == "openrlhf"
    assert run["train.schedule"] == "cosine" and run["train.min_lr_ratio"] == 0.1, (
        "OpenRLHF's defaults"
    )
    assert row_of(migration, "--micro_train_batch_size").kind == "derived"
    assert row_of(migration, "--packing_samples").kind == "derived"
    assert row_of(migration, "--save_steps").kind == "off"
    assert run["model.router_aux_loss_coef"] > 0
    assert row_of(migration, "--zero_stage").kind == "by hand"
    assert row_of(migration, "--pretrain").given.line == 8


def test_an_openrlhf_script_with_new_flags_in_a_here_document(tmp_path: Path) -> None:
    migration = migrated(SFT_OPENRLHF)
    run = values(migration, tmp_path)
    assert (
        run["train.batch_size"] == 64
        and run["train.epochs"] == 3
        and run["data.max_tokens"] == 1024
    )
    assert [(s["path"], s["weight"]) for s in run["data.train"]] == [
        ("org/a", 0.25),
        ("org/b", 0.75),
    ]
    assert (run["data.prompt"], run["data.completion"]) == ("question", "response")
    assert "lora.rank" not in run and row_of(migration, "lora.rank").kind == "off"


def test_a_verl_script_with_variables_arrays_and_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    migration = migrated(VERL)
    run = values(migration, tmp_path)
    assert run["data.train"] == "/home/me/gsm8k/train.parquet"
    assert run["rollout.prompts_per_step"] == 128 and run["rollout.group_size"] == 8
    assert run["train.batch_size"] == 512  # 64 prompts × 8 completions
    assert run["train.lr"] == 2e-6 and run["rollout.temperature"] == 0.9
    assert run["rollout.max_new_tokens"] == 2048
    assert run["system.max_tokens_per_microbatch"] == 4096
    assert (run["algorithm.kl"], run["algorithm.kl.coef"], run["algorithm.kl.estimator"]) == (
        "loss",
        0.001,
        "k3",
    )
    assert (run["algorithm.loss.clip_low"], run["algorithm.loss.clip_high"]) == (0.2, 0.28)
    assert run["algorithm.aggregation"] == "token_mean", "verl's default"
    assert run["data.too_long"] == "truncate_left"
    assert run["train.weight_decay"] == 0.01, "the critic's must not become the policy's"
    assert (
        run["monitor.sinks"] == ["wandb"]
        and run["checkpoint.every"] == 20
        and "eval.every" not in run
    )
    unknown = row_of(migration, "experiment_name")
    assert (
        unknown.kind == "computed"
        and "${EXPERIMENT}" in unknown.text
        and "monitor.run_name" in unknown.text
    )
    assert "# run_name =" in run_file(migration, "source")


def test_a_variable_may_be_given(tmp_path: Path) -> None:
    run = values(migrated(VERL, EXPERIMENT="first", n="2"), tmp_path)
    assert run["monitor.run_name"] == "first"
    assert run["train.batch_size"] == 128  # 64 prompts × 2 completions
    assert run["train.lr"] == 1e-3, "the other branch of the condition"


def test_a_trl_script_is_parsed_and_not_run(tmp_path: Path) -> None:
    migration = migrated(GRPO, "grpo.py", devices=2)
    run = values(migration, tmp_path)
    assert run["train.batch_size"] == 64  # 4 × 8 × 2 devices
    assert run["rollout.prompts_per_step"] == 8  # 64 completions, 8 per prompt
    assert (
        run["train.steps"] == 100
    )  # 200 optimizer steps, 2 for each rollout batch (num_iterations)
    assert run["train.passes_per_batch"] == 2 and "train.epochs" not in run
    assert run["reward.functions"] == ["grpo.py:correct"]
    assert run["data.train"] == "org/math" and run["model.path"] == "org/base"
    assert run["algorithm.advantage"] == "dr_grpo"  # scale_rewards=False
    assert run["algorithm.aggregation"] == "seq_mean_token_sum_norm"
    assert (run["algorithm.loss.clip_low"], run["algorithm.loss.clip_high"]) == (0.1, 0.1)
    assert (run["lora.rank"], run["lora.alpha"], run["lora.targets"]) == (
        16,
        32,
        ["q_proj", "v_proj"],
    )
    assert row_of(migration, "temperature").kind == "computed"
    assert "rollout.temperature" not in run, "TRL's default is not what an unknown value is"
    assert row_of(migration, "optim").kind == "by hand"


def test_a_batch_that_is_no_whole_number_of_groups_is_for_a_person() -> None:
    migration = migrated(GRPO.replace("num_generations=8", "num_generations=5"), "grpo.py")
    row = row_of(migration, "per_device_train_batch_size")
    assert row.kind == "by hand" and "32" in row.text and "5" in row.text
    assert "rollout.prompts_per_step" not in migration.entries


def test_an_accelerate_command(tmp_path: Path) -> None:
    migration = migrated(ACCELERATED)
    run = values(migration, tmp_path)
    assert migration.command == "dpo"
    assert run["train.batch_size"] == 64  # 2 × 8 × 4 processes
    assert run["system.trainer_ranks"] == 4 and run["train.epochs"] == 2
    assert (run["dpo.beta"], run["dpo.loss"]) == (0.2, "hinge")
    assert run["data.train.path"] == "org/pairs" and run["data.train.subset"] == "clean"
    assert row_of(migration, "label_smoothing_factor").kind == "changes"


def test_trls_ppo_has_mini_batches_and_episodes(tmp_path: Path) -> None:
    run = values(migrated(PPO, "ppo.py"), tmp_path)
    assert run["rollout.prompts_per_step"] == 64  # 16 × 4 × 1 device
    assert run["train.batch_size"] == 32  # in 2 mini-batches
    assert run["train.steps"] == 100  # 6400 episodes / 64
    assert run["train.passes_per_batch"] == 4 and run["rollout.group_size"] == 1
    assert (run["algorithm.advantage.gamma"], run["algorithm.advantage.gae_lambda"]) == (0.99, 0.9)
    assert run["algorithm.loss.clip_low"] == 0.15 and run["rollout.max_new_tokens"] == 64


def test_trls_older_ppo_names_its_batches(tmp_path: Path) -> None:
    run = values(migrated(OLD_PPO, "ppo.py"), tmp_path)
    assert (run["rollout.prompts_per_step"], run["train.batch_size"]) == (128, 16)
    assert run["train.passes_per_batch"] == 4 and run["algorithm.kl.coef"] == 0.2
    assert run["model.path"] == "org/base" and run["monitor.sinks"] == ["wandb"]


def test_a_stateset_configuration(tmp_path: Path) -> None:
    run = values(migrated(STATESET, "train.py"), tmp_path)
    assert run["algorithm.name"] == "gspo"
    assert (run["algorithm.loss.clip_low"], run["algorithm.loss.clip_high"]) == (3e-4, 4e-4)
    assert (run["rollout.prompts_per_step"], run["rollout.group_size"]) == (4, 6)
    assert run["lora.rank"] == 8 and run["rollout.max_new_tokens"] == 300


def test_verls_supervised_training_counts_samples(tmp_path: Path) -> None:
    run = values(migrated(SFT_VERL), tmp_path)
    assert run["train.batch_size"] == 64 and run["data.max_tokens"] == 512
    assert run["system.trainer_ranks"] == 2 and run["lora.rank"] == 32
    assert run["train.betas"] == [0.9, 0.95], "verl's default"


def test_ranks_that_share_a_sequence_come_along(tmp_path: Path) -> None:
    sharing = SFT_VERL.rstrip() + " ulysses_sequence_parallel_size=2\n"
    assert values(migrated(sharing), tmp_path)["system.sequence_parallel.size"] == 2
    verl = VERL.replace(
        "critic.optim.lr",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 critic.optim.lr",
    )
    assert row_of(migrated(verl), "ulysses").kind == "by hand"


def test_verls_asynchronous_training(tmp_path: Path) -> None:
    run = values(migrated(ASYNC), tmp_path)
    assert run["rollout.prompts_per_step"] == 128  # 4 batches of 32 prompts
    assert run["train.batch_size"] == 512  # 32 prompts × 16 completions
    assert run["train.steps"] == 400 and "train.epochs" not in run  # 51200 prompts, 128 a step
    assert (
        run["rollout.max_staleness"] == 1
        and run["rollout.partial"] is True
        and run["system.engine_process"] is True
    )
    assert (run["algorithm.overlong.buffer"], run["algorithm.overlong.factor"]) == (512, 0.5)


def test_a_trl_yaml_file(tmp_path: Path) -> None:
    text = """
    model_name_or_path: org/base
    dataset_name: org/chats
    learning_rate: 1e-4
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 3
    lr_scheduler_type: cosine_with_min_lr
    lr_scheduler_kwargs: {min_lr_rate: 0.1}
    packing: true
    """
    migration = migrated(text, "sft.yaml", devices=4)
    run = values(migration, tmp_path)
    assert migration.command == "sft" and run["train.batch_size"] == 24  # 2 × 3 × 4 devices
    assert (
        run["train.lr"] == 1e-4
        and run["train.schedule"] == "cosine"
        and run["train.min_lr_ratio"] == 0.1
    )
    assert (
        row_of(migration, "packing").kind == "derived"
        and row_of(migration, "packing").given.line == 9
    )


def test_training_arguments_as_json(tmp_path: Path) -> None:
    arguments = {
        "output_dir": "out",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
    }
    text = json.dumps(
        {**arguments, "learning_rate": 3e-5, "warmup_steps": 10, "adam_beta2": 0.95, "fp16": False}
    )
    run = values(migrated(text, "training_args.json"), tmp_path)
    assert (
        run["train.batch_size"] == 16
        and run["train.warmup_steps"] == 10
        and run["train.betas"] == [0.9, 0.95]
    )


def test_a_deepspeed_file(tmp_path: Path) -> None:
    tree = {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": "auto"},
        },
    }
    migration = migrated(json.dumps(tree), "ds.json", devices=8)
    run = values(migration, tmp_path)
    assert (
        run["train.batch_size"] == 96
        and run["train.max_grad_norm"] == 0.5
        and run["train.lr"] == 2e-5
    )
    assert run["model.dtype"] == "bfloat16" and run["train.betas"] == [0.9, 0.95]
    assert row_of(migration, "weight_decay").kind == "off"


def test_an_accelerate_file(tmp_path: Path) -> None:
    text = """
    compute_environment: LOCAL_MACHINE
    distributed_type: DEEPSPEED
    deepspeed_config: {zero_stage: 3, offload_optimizer_device: none}
    mixed_precision: bf16
    num_machines: 1
    num_processes: 8
    """
    run = values(migrated(text, "accelerate.yaml"), tmp_path)
    assert (
        run["system.zero_stage"] == 3
        and run["system.trainer_ranks"] == 8
        and run["model.dtype"] == "bfloat16"
    )


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ({"torch_compile": True}, "default"),
        ({"torch_compile": True, "torch_compile_mode": "reduce-overhead"}, "default"),
        ({"torch_compile": True, "torch_compile_mode": "max-autotune"}, "max-autotune"),
        ({"torch_compile_mode": "max-autotune-no-cudagraphs"}, "max-autotune"),
        ({"torch_compile_backend": "inductor"}, "default"),
        ({"torch_compile_backend": "onnxrt"}, None),
        ({"torch_compile": False}, None),
    ],
)
def test_modes_of_torch_compile(said: dict[str, Any], mode: str | None, tmp_path: Path) -> None:
    text = json.dumps({"output_dir": "out", "per_device_train_batch_size": 8, **said})
    assert values(migrated(text, "training_args.json"), tmp_path).get("system.compile") == mode


@pytest.mark.parametrize(
    ("said", "kernels"),
    [
        ({"use_liger_kernel": True}, "liger"),
        ({"use_liger_kernel": False}, None),
        ({"use_liger_kernel": True, "torch_compile": True}, None),
    ],
)
def test_liger_s_kernels(said: dict[str, Any], kernels: str | None, tmp_path: Path) -> None:
    text = json.dumps({"output_dir": "out", "per_device_train_batch_size": 8, **said})
    assert values(migrated(text, "training_args.json"), tmp_path).get("system.kernels") == kernels


def test_dynamo_of_accelerate_goes_with_sharding(tmp_path: Path) -> None:
    text = "{mixed_precision: bf16, num_processes: 8, dynamo_config: {dynamo_backend: INDUCTOR}"
    assert values(migrated(f"{text}}}", "accelerate.yaml"), tmp_path)["system.compile"] == "default"
    run = values(
        migrated(f"{text}, deepspeed_config: {{zero_stage: 3}}}}", "accelerate.yaml"), tmp_path
    )
    assert run["system.zero_stage"] == 3 and run["system.compile"] == "default"


def test_a_verl_yaml_file(tmp_path: Path) -> None:
    text = """
    data: {train_files: train.parquet, train_batch_size: 32, max_response_length: 100}
    actor_rollout_ref:
      model: {path: org/base}
      actor: {ppo_mini_batch_size: 16, optim: {lr: 1e-6}}
      rollout: {n: 4}
    algorithm: {adv_estimator: rloo}
    trainer: {total_training_steps: 50}
    """
    run = values(migrated(text, "ppo.yaml"), tmp_path)
    assert (
        run["train.batch_size"] == 64
        and run["train.steps"] == 50
        and run["algorithm.name"] == "rloo"
    )


def test_a_docstring_may_hold_the_command(tmp_path: Path) -> None:
    command = "python trl/scripts/sft.py --model_name_or_path org/base --dataset_name org/d"
    script = f'"""\n{command} --learning_rate 2e-5\n"""\n'
    run = values(migrated(script + "main(parser.parse_args())", "sft.py"), tmp_path)
    assert run["train.lr"] == 2e-5 and run["data.train"] == "org/d"


def test_a_notebook(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": ["%pip install trl\n", "x = 1"]},
        {"cell_type": "code", "source": [GRPO]},
    ]
    run = values(migrated(json.dumps({"cells": cells}), "grpo.ipynb"), tmp_path)
    assert run["lora.rank"] == 16


def test_each_line_of_the_run_file_says_where_it_comes_from() -> None:
    migration = migrated(OPENRLHF)
    text = run_file(migration, "ppo.sh")
    lines = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert len(lines) > 20 and all("  # " in line for line in lines)
    assert "lr = 5e-07  # --actor_learning_rate 5e-7 (line 16)" in lines
    assert tomllib.loads(text)
    rows = [line for line in account(migration) if line.startswith("  ")]
    assert len(rows) == len(migration.launch.settings)


def test_secrets_are_not_copied() -> None:
    migration = migrated(OPENRLHF.replace("{token}", "hf_abcdefghijklmnopqrstuvwxyz"))
    printed = run_file(migration, "s") + "\n".join(account(migration))
    assert "hf_abcdefghijklmnop" not in printed


BAD = {
    "empty.sh": b"",
    "other.sh": b"ls -la | grep 'x'\n",
    "quotes.sh": b"python -m verl.trainer.main_ppo a='b c=${d \"e $((1 + \n",
    "binary.sh": bytes(range(256)),
    "deep.sh": b"x=" + b"$(" * 500,
    "bad.py": b"def (:\n",
    "none.py": b"print('hello')\n",
    "bad.yaml": b"a: [1, {b\n",
    "tabs.yaml": b"a:\n\tb: 1\n",
    "list.yaml": b"- 1\n- 2\n",
    "bad.json": b'{"a": ',
    "deep.json": b"[" * 100_000,
    "other.json": b'{"colour": "red", "size": 3}',
    "bad.ipynb": b"{}",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_without_a_traceback(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BAD[name])
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / name)])
    assert result.exit_code in (0, 2), result.output
    assert "Traceback" not in result.output and name in result.output


def test_values_of_wrong_kinds_are_accounted_for() -> None:
    text = """
    python -m verl.trainer.main_ppo data.train_batch_size=many actor_rollout_ref.rollout.n=-3 \\
      actor_rollout_ref.actor.optim.lr=fast data.train_files={a:1} trainer.total_epochs=[] \\
      actor_rollout_ref.actor.optim.betas=3 trainer.logger={} actor_rollout_ref.actor.clip_ratio=[1,2] \\
      trainer.total_training_steps=1e999 no.such.setting=1 actor_rollout_ref.rollout.temperature=null \\
      algorithm.adv_estimator=magic
    """
    migration = migrated(text)
    assert row_of(migration, "no.such.setting").kind == "unknown"
    assert row_of(migration, "total_training_steps").kind == "by hand"
    assert all(row.text or row.kind == "mapped" for row in migration.rows)


def test_what_only_the_run_knows_is_named_with_its_key_unless_its_value_does_not_matter(
    tmp_path: Path,
) -> None:
    text = """
    python -m verl.trainer.main_ppo data.train_files=train.jsonl actor_rollout_ref.model.path=$1 \\
      actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$M \\
      actor_rollout_ref.rollout.temperature=$T critic.model.path=$1
    """
    migration = migrated(text)
    model = row_of(migration, "actor_rollout_ref.model.path")
    assert (model.kind, model.keys) == ("computed", ("model.path",)) and "${1}" in model.text
    assert row_of(migration, "micro_batch_size_per_gpu").kind == "derived", "whatever its value is"
    assert row_of(migration, "temperature").keys == ("rollout.temperature",)
    assert "# path =" in run_file(migration, "source") and "# temperature =" in run_file(
        migration, "source"
    )
    assert values(migrated(text, **{"1": "org/base"}), tmp_path)["model.path"] == "org/base"


def test_settings_that_are_another_ones_in_yaml_have_its_value() -> None:
    text = """
    data: {train_files: train.jsonl, max_prompt_length: 128}
    actor_rollout_ref:
      model: {path: org/base}
      actor: {ppo_mini_batch_size: "${data.train_batch_size}", ppo_epochs: 2}
    critic: {ppo_epochs: "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}", ppo_mini_batch_size: "${no.such}"}
    algorithm: {adv_estimator: gae}
    """
    migration = migrated(textwrap.dedent(text), "verl.yaml")
    given = {row.given.name: row.given.value for row in migration.rows}
    assert given["critic.ppo_epochs"] == 2, "that of the policy"
    assert given["actor_rollout_ref.actor.ppo_mini_batch_size"] == "${data.train_batch_size}", (
        "which is not given"
    )
    assert row_of(migration, "critic.ppo_mini_batch_size").kind != "mapped"


def test_an_environment_of_a_script_is_a_class_of_it() -> None:
    text = """
    from trl import GRPOConfig, GRPOTrainer
    class Game:
        pass
    GRPOTrainer(model="org/base", args=GRPOConfig(output_dir="runs"), environment_factory=Game)
    """
    migration = migrated(textwrap.dedent(text), "play.py")
    assert migration.entries["environment.path"].value == "play.py:Game"
    other = migrated(textwrap.dedent(text).replace("factory=Game", "factory=made()"), "play.py")
    assert row_of(other, "environment_factory").kind == "computed"


def test_the_command_writes_a_run_file_that_is_checked(tmp_path: Path) -> None:
    (tmp_path / "dpo.sh").write_text(ACCELERATED)
    out = tmp_path / "run.toml"
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "dpo.sh"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "train.batch_size = 64" in result.output
    check(load_config(find_kind(out), out))
    again = CliRunner().invoke(app, ["migrate", str(tmp_path / "dpo.sh"), "-o", str(out)])
    assert again.exit_code == 2 and "already" in again.output
    wrong = CliRunner().invoke(app, ["migrate", str(tmp_path / "dpo.sh"), "no assignment"])
    assert wrong.exit_code == 2 and "NAME=value" in wrong.output


def test_several_programs_are_named_and_one_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "both.sh").write_text(SFT_VERL + ACCELERATED)
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "both.sh"), "--which", "2"])
    assert (
        result.exit_code == 0 and "hinge" in result.output and "fsdp_sft_trainer" in result.output
    )
    assert (
        CliRunner().invoke(app, ["migrate", str(tmp_path / "both.sh"), "--which", "3"]).exit_code
        == 2
    )


def test_a_server_is_named(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text("python -m openrlhf.cli.serve_rm --port 5000\n")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "serve.sh")])
    assert result.exit_code == 2 and "serve-reward" in result.output


def test_a_sourced_script_is_followed(tmp_path: Path) -> None:
    (tmp_path / "sft.sh").write_text(SFT_OPENRLHF)
    [launch] = read_text(
        "name=sft\nsource ./${name}.sh slurm\nsource ./job.sh\n", tmp_path / "job.sh", {}
    )
    assert launch.name == "openrlhf.cli.train_sft"
    (tmp_path / "a.sh").write_text("source b.sh\n")
    (tmp_path / "b.sh").write_text("source a.sh\n")
    with pytest.raises(ConfigError, match="nested"):
        read_text("source a.sh\n", tmp_path / "c.sh", {})


def test_a_source_that_is_missing_or_a_directory_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "gone.sh", tmp_path):
        assert CliRunner().invoke(app, ["migrate", str(source)]).exit_code == 2
    with pytest.raises(ConfigError):
        read_text("{", Path("x.json"), {})


def test_the_example_on_the_page_is_what_is_written() -> None:
    page = ROOT / "docs" / "coming-from.md"
    [script] = [block.text for block in blocks_of(page) if block.language == "bash"]
    migration = migrated(script)
    assert run_file(migration, "train.sh") in [
        block.text for block in blocks_of(page) if block.language == "toml"
    ]
    text = "\n".join(account(migration)) + "\n"
    assert text in [block.text for block in blocks_of(page) if block.language == "text"]


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]\n",
        "a: &a [x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    ],
)
def test_aliases_without_end_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "verl.yaml").write_text(text)
    with pytest.raises(ConfigError, match="aliases"):
        read_source(tmp_path / "verl.yaml", {})


DEEPSPEED = """
# deepspeed_config.json
{
    "zero_optimization": {
        "stage": 2,  // shards optimizer and gradients
        "offload_optimizer": {"device": "cpu", "pin_memory": true}
    },
    "bf16": {"enabled": true},
    "gradient_clipping": 0.5
}
"""
WITHOUT_COMMENTS = DEEPSPEED.replace("  // shards optimizer and gradients", "")


@pytest.mark.parametrize(
    "text", [WITHOUT_COMMENTS, WITHOUT_COMMENTS.replace("# deepspeed_config.json", "// a comment")]
)
@pytest.mark.parametrize("name", ["ds.json", "block.py"])
def test_deepspeed_s_file_may_have_comments(text: str, name: str, tmp_path: Path) -> None:
    if name.endswith(".py") and "//" in text:
        return
    run = values(migrated(text, name, devices=8), tmp_path)
    assert (run["system.zero_stage"], run["system.trainer_ranks"]) == (2, 8)
    assert run["system.offload_optimizer"] is True and run["train.max_grad_norm"] == 0.5
    alone = migrated(text, name)
    assert row_of(alone, "stage").kind == "by hand" and "--devices" in row_of(alone, "stage").text
    assert alone.entries["system.offload_optimizer"].value is True


def test_the_file_of_deepspeed_that_a_script_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DEEPSPEED.replace("  // shards optimizer and gradients", ""))
    (tmp_path / "train.py").write_text(
        "from trl import SFTConfig, SFTTrainer\nSFTTrainer('org/m', SFTConfig(output_dir='o', deepspeed='ds.json', "
        "max_grad_norm=0.7), train_dataset='org/d')\n"
    )
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 4 --use_deepspeed train.py\n"
    )
    for source in ("train.py", "run.sh"):
        [launch] = read_source(tmp_path / source, {})
        entries = convert(launch).entries
        assert (
            entries["system.offload_optimizer"].value is True
            and entries["model.dtype"].value == "bfloat16"
        )
        assert entries["train.max_grad_norm"].value == 0.7, "the script's own wins"
    assert entries["system.trainer_ranks"].value == 4 and entries["system.zero_stage"].value == 2
    assert {"--num_processes 4", "--use_deepspeed"} <= {
        row.given.text for row in convert(launch).rows
    }
    (tmp_path / "ds.json").unlink()
    [launch] = read_source(tmp_path / "train.py", {})
    assert any("ds.json" in note and "line 2" in note for note in launch.notes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--train.max_tokens_per_gpu 16384 --rollout.max_tokens_per_gpu 32768",
            {"system.max_tokens_per_microbatch": 16384, "system.scoring_max_tokens": 32768},
        ),
        (
            "--train_max_tokens_per_gpu 16384 --rollout_max_tokens_per_gpu 32768",
            {"system.max_tokens_per_microbatch": 16384, "system.scoring_max_tokens": 32768},
        ),
        ("--adam_offload", {"system.offload_optimizer": True}),
        ("--ds.adam_offload --actor.optim muon", {"system.offload_optimizer": None}),
        ("--fp16", {"model.dtype": "float16"}),
        ("--bf16", {"model.dtype": "bfloat16"}),
        ("--fp16 --bf16", {"model.dtype": "bfloat16"}),
    ],
)
def test_settings_of_openrlhf_s_trainer(options: str, expected: dict[str, Any]) -> None:
    text = f"python -m openrlhf.cli.train_ppo_ray --pretrain org/m --prompt_data org/d --remote_rm_url r.py {options}"
    migration = migrated(text)
    for key, value in expected.items():
        entry = migration.entries.get(key)
        assert (entry and entry.value) == value
    if "muon" in options:
        assert "Muon" in row_of(migration, "adam_offload").text


def of(text: str, key: str, **said: str) -> Any:
    """A setting of the run file of a text of verl (overrides), OpenRLHF (options) or TRL (a class
    and its arguments); None if it is not there."""
    if text.startswith("--"):
        given = "--pretrain org/m --prompt_data org/d --remote_rm_url r.py"
        migration = migrated(f"python -m openrlhf.cli.train_ppo_ray {given} {text}", **said)
    elif "=" in text.partition(" ")[0].partition("(")[0]:
        given = "data.train_files=d.parquet actor_rollout_ref.model.path=org/m"
        migration = migrated(f"python -m verl.trainer.main_ppo {given} {text}", **said)
    else:
        name = text.partition("(")[0]
        migration = migrated(f"from trl import {name}\nargs = {text}\n", "train.py", **said)
    entry = migration.entries.get(key)
    return entry and entry.value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("--advantage_estimator gae", "algorithm.advantage.gae_lambda", 1.0),
        ("--advantage_estimator group_norm", "algorithm.advantage.gae_lambda", None),
        ("algorithm.adv_estimator=gae", "algorithm.advantage.gae_lambda", 1.0),
        ("algorithm.adv_estimator=gae algorithm.lam=0.9", "algorithm.advantage.gae_lambda", 0.9),
        ("algorithm.adv_estimator=grpo", "algorithm.advantage.gae_lambda", None),
    ],
)
def test_lambda_is_the_framework_s_where_it_is_left_out(text: str, key: str, value: Any) -> None:
    assert of(text, key) == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("algorithm.adv_estimator=grpo_passk", "algorithm.name", None),
        ("actor_rollout_ref.actor.shuffle=False", "data.shuffle", None),
        ("data.shuffle=False actor_rollout_ref.actor.shuffle=True", "data.shuffle", False),
        ("SFTConfig(lr_scheduler_type='inverse_sqrt')", "train.schedule", None),
        ("GKDConfig(beta=0.5)", "algorithm.kl.coef", None),
        ("GKDConfig(beta=0.5)", "distill.mode", None),
        ("DistillationConfig(beta=1.0)", "distill.mode", "on_policy"),
        ("DistillationConfig(beta=0.0)", "distill.mode", "sampled"),
        ("GRPOConfig(beta=0.04)", "algorithm.kl.coef", 0.04),
    ],
)
def test_what_looks_alike_and_is_not_is_not_copied(text: str, key: str, value: Any) -> None:
    assert of(text, key) == value


@pytest.mark.parametrize(
    ("kwargs", "share"),
    [
        ({"min_lr_rate": 0.1}, 0.1),
        ({"min_lr": 2e-6}, 0.2),
        ({"num_cycles": 3}, None),
        ({"min_lr_rate": 0.1, "num_cycles": 3}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("name", ["sft.yaml", "train.py"])
def test_the_last_rate_of_a_schedule(kwargs: dict[str, float], share: Any, name: str) -> None:
    said = {"learning_rate": 1e-5, "lr_scheduler_type": "cosine_with_min_lr"}
    text = json.dumps({"dataset_name": "org/d", **said, "lr_scheduler_kwargs": kwargs})
    if name == "train.py":
        arguments = ", ".join(f"{key}={value!r}" for key, value in said.items())
        arguments = f"{arguments}, lr_scheduler_kwargs={kwargs}"
        text = f"from trl import SFTConfig\nargs = SFTConfig({arguments})\n"
    migration = migrated(text, name)
    entry = migration.entries.get("train.min_lr_ratio")
    if "num_cycles" not in kwargs:
        assert (entry and entry.value) == (share and pytest.approx(share))
    else:
        assert any(r.kind in ("by hand", "changes") for r in migration.rows), "it is said"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("--lora_rank 64", "lora.alpha", 16),
        ("--lora_rank 0", "lora.alpha", None),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.model.lora_rank=64", "lora.alpha", 16),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.model.lora_rank=0", "lora.alpha", None),
        ("SFTConfig(use_peft=True, lora_r=64)", "lora.alpha", 32),
        ("SFTConfig(lora_alpha=64)", "lora.alpha", None),
        ("SFTConfig(max_length=64)", "data.too_long", "truncate_right"),
        ("SFTConfig(max_grad_norm=None)", "train.max_grad_norm", 0.0),
        ("RewardConfig(max_length=64)", "data.too_long", "skip"),
        ("SFTConfig(completion_only_loss=False)", "data.loss_on", "all"),
        ("SFTConfig(completion_only_loss=True)", "data.loss_on", "completion"),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.agent.num_workers=8",
            "environment.concurrency",
            None,
        ),
    ],
)
def test_defaults_and_counts_are_those_of_the_framework(text: str, key: str, value: Any) -> None:
    assert of(text, key) == value


def test_an_adapter_of_peft_has_its_scale_and_layers() -> None:
    text = """
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer
    SFTTrainer("org/m", SFTConfig(output_dir="o"), peft_config=LoraConfig(r=16), train_dataset="org/d")
    """
    entries = migrated(text, "train.py").entries
    assert entries["lora.alpha"].value == 8 and "q_proj" in entries["lora.rank"].how
    named = text.replace("r=16", "r=16, lora_alpha=64, target_modules='all-linear'")
    entries = migrated(named, "train.py").entries
    assert entries["lora.alpha"].value == 64 and not entries["lora.rank"].how


def test_turns_are_calls_and_the_last_answer() -> None:
    text = """
    from trl import GRPOConfig, GRPOTrainer
    def add(a: int, b: int) -> int:
        return a + b
    GRPOTrainer(model="org/m", tools=[add], args=GRPOConfig(max_tool_calling_iterations=3))
    """
    assert migrated(text, "play.py").entries["environment.max_turns"].value == 4


ROLLOUT = "algorithm.rollout_correction."
LEVEL = "--algo.advantage.is_correction_"
WITH_VLLM = "GRPOConfig(use_vllm=True, vllm_importance_sampling_"


@pytest.mark.parametrize(
    ("text", "kind", "low", "high"),
    [
        (f"{ROLLOUT}rollout_is=token {ROLLOUT}rollout_is_threshold=3", "token_truncate", None, 3),
        (f"{ROLLOUT}rollout_rs=token {ROLLOUT}rollout_rs_threshold=3", None, None, None),
        (
            f"{ROLLOUT}rollout_rs=geometric {ROLLOUT}rollout_rs_threshold=1.25",
            "geometric",
            0.8,
            1.25,
        ),
        (
            f"{ROLLOUT}rollout_rs=seq_mean_k1 {ROLLOUT}rollout_rs_threshold=0.99_1.01",
            "geometric",
            0.99,
            1.01,
        ),
        (
            f"{ROLLOUT}rollout_is=sequence {ROLLOUT}rollout_is_threshold=5.0 "
            f"{ROLLOUT}rollout_rs=seq_mean_k3 {ROLLOUT}rollout_rs_threshold=0.005",
            "sequence_truncate",
            None,
            5.0,
        ),
        ("--enable_vllm_is_correction", "token_clamp", 0.5, 5.0),
        (
            "--enable_vllm_is_correction --vllm_is_correction_type icepop "
            "--vllm_is_truncated_threshold 0.6 4.0",
            "icepop",
            0.6,
            4.0,
        ),
        (
            "--enable_vllm_is_correction --vllm_is_truncated_threshold 2",
            "token_truncate",
            None,
            2,
        ),
        (f"{LEVEL}level token", "icepop", 0.5, 5.0),
        (f"{LEVEL}level token {LEVEL}mode clip {LEVEL}threshold 0.1 3.0", "token_clamp", 0.1, 3.0),
        (f"{LEVEL}level seq {LEVEL}gating ratio", "sequence_mask", 0.5, 5.0),
        (
            f"{LEVEL}level seq {LEVEL}gating binary_kl {LEVEL}threshold 5e-3",
            None,
            None,
            None,
        ),
        (f"{LEVEL}level off {LEVEL}gating ratio", None, None, None),
        (f"{WITH_VLLM}correction=True)", None, None, None),
        (f"{WITH_VLLM}mode='token_truncate')", "token_truncate", None, 3.0),
        (f"{WITH_VLLM}mode='token_mask', vllm_importance_sampling_cap=4.0)", "icepop", 0.0, 4.0),
        (
            f"{WITH_VLLM}mode='token_truncate', vllm_importance_sampling_clip_min=0.2)",
            "token_clamp",
            0.2,
            3.0,
        ),
        (
            f"{WITH_VLLM}mode='token_mask', vllm_importance_sampling_correction=False)",
            None,
            None,
            None,
        ),
        ("GRPOConfig(vllm_importance_sampling_mode='token_mask')", None, None, None),
    ],
)
def test_corrections_keep_their_meaning(text: str, kind: Any, low: Any, high: Any) -> None:
    told = (of(text, f"algorithm.correction{key}") for key in ("", ".low", ".high"))
    assert tuple(told) == (kind, low, high)


def test_a_job_of_ray_is_a_run_on_ray() -> None:
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --prompt_data org/d --remote_rm_url r.py "
        "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --async_train"
    )
    on_ray = migrated(f'ray job submit --address="http://127.0.0.1:8265" -- {command}').entries
    assert on_ray["system.cluster"].value == "ray" and "system.engine_process" not in on_ray
    assert (
        on_ray["system.ray_address"].value == "http://127.0.0.1:8265"
        and on_ray["system.engines"].value == 4
    )
    alone = migrated(command).entries
    assert "system.cluster" not in alone and alone["system.engine_process"].value is True


def test_openrlhf_s_inference_with_vllm() -> None:
    text = (
        "python -m openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain org/m --dataset org/d --tp_size 2 "
        "--output_path out.jsonl"
    )
    entries = migrated(text).entries
    assert (
        entries["system.engine"].value == "vllm"
        and entries["system.vllm.tensor_parallel_size"].value == 2
    )


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("model = torch.compile(model)", "system.compile", "default"),
        ("model = torch.compile(model, mode='max-autotune')", "system.compile", "max-autotune"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "", None),
        ("torch.set_float32_matmul_precision('high')", "", None),
        ("model.gradient_checkpointing_enable()", "system.gradient_checkpointing", True),
    ],
)
def test_switches_of_torch_are_accounted_for(line: str, key: str, value: Any) -> None:
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n"
        "model = AutoModelForCausalLM.from_pretrained('org/m', torch_dtype=torch.bfloat16)\n"
        f"{line}\nSFTTrainer(model=model, args=SFTConfig(output_dir='o'), train_dataset='org/d')\n"
    )
    migration = migrated(text, "train.py")
    [row] = [row for row in migration.rows if row.given.line == 5]
    assert row.given.text in line and row.kind != "unknown"
    assert (
        migration.entries["model.path"].value == "org/m"
        and migration.entries["model.dtype"].value == "bfloat16"
    )
    if key:
        assert migration.entries[key].value == value


@pytest.mark.parametrize(
    ("text", "framework", "command", "key", "value"),
    [
        (
            "from stateset_agents.training.trainer import GRPOTrainer\nGRPOTrainer(config=c, learning_rate=1e-5)",
            "stateset-agents",
            "rl",
            "train.lr",
            1e-5,
        ),
        (
            "from stateset_agents import training\ntraining.GRPOTrainer(config=c)",
            "stateset-agents",
            "rl",
            "train.lr",
            None,
        ),
        (
            "from trl import GRPOTrainer\nGRPOTrainer(model='org/m', reward_funcs=f)",
            "trl",
            "rl",
            "train.lr",
            1e-6,
        ),
        (
            "from stateset_agents.core.agent import AgentConfig\nAgentConfig(model_name='org/m', use_4bit=True)",
            "stateset-agents",
            "rl",
            "model.path",
            "org/m",
        ),
        (
            "from stateset_agents.core.agent_backends import create_vllm_backend\n"
            "create_vllm_backend(model_name='org/m', tensor_parallel_size=2, max_num_seqs=256)",
            "stateset-agents",
            "generate",
            "system.max_running",
            256,
        ),
    ],
)
def test_classes_of_one_name_are_told_apart_by_their_import(
    text: str, framework: str, command: str, key: str, value: Any
) -> None:
    migration = migrated(text, "train.py")
    assert (migration.launch.program.framework, migration.command) == (framework, command)
    entry = migration.entries.get(key)
    assert (entry and entry.value) == value


GROWING = {
    "values": "x0=aaaaaaaaaa\n" + "".join(f"x{n}={f'$x{n - 1}' * 10}\n" for n in range(1, 25)),
    "arrays": "a=(1 2)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 40,
    "defaults": "x0=aaaaaaaaaa\n"
    + "".join(f'x{n}="${{x{n - 1}:-b}}${{x{n - 1}}}"\n' for n in range(1, 40)),
}


@pytest.mark.parametrize("lines", GROWING.values(), ids=GROWING)
def test_variables_that_grow_without_end_are_refused(lines: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{lines}{ACCELERATED}")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "run.sh")])
    assert result.exit_code == 2 and "longer than" in result.output


def test_numbers_that_grow_without_end_are_unknown() -> None:
    growing = "x=10\n" + "x=$((x * x))\n" * 60
    migration = migrated(
        growing + VERL.replace("data.train_batch_size=128", "data.train_batch_size=$x")
    )
    assert migration.entries["rollout.group_size"].value == 8
    assert row_of(migration, "data.train_batch_size").kind == "computed"


ODD = {
    "date.yaml": "output_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\nrun_name: 2024-01-01\n",
    "time.yaml": "output_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\nrun_name: 2024-01-01T10:00:00Z\n",
    "set.yaml": "output_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\nreport_to: !!set {wandb}\n",
    "binary.yaml": "output_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\nrun_name: !!binary aGVsbG8=\n",
    "keys.yaml": "output_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\n1: 2\nnull: 3\n2020-01-01: 4\n",
    "half.json": '{"output_dir": "\\ud800", "learning_rate": 1e-4, "per_device_train_batch_size": 2}',
    "half.py": "from trl import SFTConfig\nSFTConfig(output_dir='\\ud800', learning_rate=1e-4)\n",
    "half.yaml": 'output_dir: "\\ud800"\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\n',
    "list.py": "from trl import SFTConfig\nSFTConfig(output_dir='o', learning_rate=1e-4, "
    "report_to={'wandb'}, x=1j, y=b'')\n",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_end_in_no_traceback(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(ODD[name])
    out = tmp_path / "run.toml"
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / name), "-o", str(out)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 0:
        assert tomllib.loads(out.read_text(encoding="utf-8"))["train"]["lr"] == 1e-4
