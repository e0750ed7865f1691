"""Names of other frameworks: each is answered with ours, with how its value is converted, or with
why there is none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.documents import ROOT, blocks_of
from tests.support.foreign_names import counts, fields, frameworks, leaves, listed, options
from tunesmith.config.commands import KINDS, all_keys, commands_with
from tunesmith.config.load import load_config
from tunesmith.config.reading.describe import choices_at
from tunesmith.config.reading.problems import dotted, key_lines
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.values import CONVERSIONS
from tunesmith.guide.names.foreign import (
    EARLIER,
    FRAMEWORKS,
    foreign_values,
    meanings,
    meanings_of,
    value_of,
)
from tunesmith.guide.names.unknown import find

KEYS = {key for kind in KINDS.values() for key in all_keys(kind)}


def refused(*overrides: str, kind: type[RunConfig] = RLConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(kind, None, ["model.path=org/m", "data.train=org/d", *overrides])
    return str(caught.value)


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.more
def test_nearly_every_setting_of_a_framework_is_answered(framework: str) -> None:
    keys, reasons, unanswered = counts(framework)
    assert len(listed(framework)) >= 100
    assert (keys + reasons) / len(listed(framework)) >= 0.98, unanswered
    for name in listed(framework):  # also as what a run file of some command says
        assert name in unanswered or any(
            (f := find(kind, name)).keys or f.why for kind in KINDS.values()
        ), name


# Read one by one in the documentation of the frameworks; what is not here is held by the tests
# below only.
MEANT = {
    "learning_rate": "train.lr",
    "actor_learning_rate": "train.lr",
    "actor.adam.lr": "train.lr",
    "ds.adam_offload": "system.offload_optimizer",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "system.offload_optimizer",
    "zero_optimization.offload_optimizer.device": "system.offload_optimizer",
    "zero_optimization.offload_param.device": "system.offload_parameters",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "system.offload_parameters",
    "offload_param_device": "system.offload_parameters",
    "fsdp_offload_params": "system.offload_parameters",
    "fsdp_cpu_offload": "system.offload_parameters",
    "critic.optim": "train.optimizer",
    "critic.adam.lr": "critic.lr",
    "actor_rollout_ref.actor.optim.lr": "train.lr",
    "critic.optim.lr": "critic.lr",
    "optimizer.params.lr": "train.lr",
    "num_generations": "rollout.group_size",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "rollout.n_samples_per_prompt": "rollout.group_size",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.samples",
    "max_completion_length": "rollout.max_new_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "data.train_batch_size": "rollout.prompts_per_step",
    "rollout.batch_size": "rollout.prompts_per_step",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "num_iterations": "train.passes_per_batch",
    "actor_rollout_ref.actor.ppo_epochs": "train.passes_per_batch",
    "critic.ppo_epochs": "critic.passes_per_batch",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.loss.clip_low algorithm.loss.clip_high",
    "actor.eps_clip_low_high": "algorithm.loss.clip_low algorithm.loss.clip_high",
    "delta": "algorithm.loss.dual_clip",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.loss.dual_clip",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coef",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "algo.kl.init_coef": "algorithm.kl.coef",
    "beta": "algorithm.kl.coef",
    "algorithm.lam": "algorithm.advantage.gae_lambda",
    "lambd": "algorithm.advantage.gae_lambda",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "algorithm.filter_groups.enable": "algorithm.dynamic_filter",
    "algo.dynamic_filtering_enable": "algorithm.dynamic_filter",
    "importance_sampling_level": "algorithm.loss",
    "clip_range_left": "algorithm.loss.clip_low",
    "train.async_enable": "rollout.max_staleness",
    "train.async_queue_size": "rollout.queue_size",
    "OPENRLHF_ASYNC_QUEUE_SIZE": "rollout.queue_size",
    "train.partial_rollout_enable": "rollout.partial",
    "train.colocate_all": "system.hybrid",
    "colocate_all_models": "system.hybrid",
    "vllm.enable_sleep": "system.hybrid",
    "vllm.num_engines": "system.engines",
    "vllm_sync_backend": "system.weight_plane",
    "tensor_model_parallel_size": "system.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "system.kv_memory system.vllm.memory_share",
    "max_num_seqs": "system.max_running",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "system.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "system.scoring_max_tokens",
    "critic.forward_max_token_len_per_gpu": "system.scoring_max_tokens",
    "critic.ppo_max_token_len_per_gpu": "system.critic_max_tokens",
    "reward_model.forward_max_token_len_per_gpu": "system.reward_max_tokens",
    "gradient_clipping": "train.max_grad_norm",
    "trainer.total_epochs": "train.epochs",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "save_total_limit": "checkpoint.keep",
    "load_in_4bit": "model.quantize",
    "use_8bit": "model.quantize",
    "lora.rank": "lora.rank",
    "model_name_or_path": "model.path",
    "actor_rollout_ref.model.path": "model.path",
    "critic.model.path": "critic.path",
    "reward_funcs": "reward.functions",
    "remote_rm_url": "reward.remote",
    "log_completions": "monitor.samples",
    "assistant_model": "system.draft_model",
    "num_processes": "system.trainer_ranks",
    "ds.zero_stage": "system.zero_stage",
    "torch_compile_mode": "system.compile",
    "use_liger_kernel": "system.kernels",
    "actor_rollout_ref.model.use_liger": "system.kernels",
    "ulysses_sequence_parallel_size": "system.sequence_parallel.size",
    "ds.ring_attn_size": "system.sequence_parallel.size",
    "zero_optimization.stage": "system.zero_stage",
    "fp16": "model.dtype",
    "fp16.enabled": "model.dtype",
    "train.max_tokens_per_gpu": "system.max_tokens_per_microbatch",
    "rollout.max_tokens_per_gpu": "system.scoring_max_tokens",
}
ABSENT = {
    "fsdp": "system.zero_stage",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "system.zero_stage",
    "ring_head_stride": "head",
    "packing_samples": "packed",
    "use_remove_padding": "packed",
    "micro_train_batch_size": "micro-batches",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "micro-batches",
    "use_fused_kernels": "fused",
    "liger_kernel_config": "system.kernels",
    "use_torch_compile": "torch.compile",
    "deepcompile": "torch.compile",
    "dataloader_num_workers": "loader",
    "persistent_workers": "loader",
    "top_entropy_quantile": "no loss",
    "disable_log_stats": "engines",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "Megatron",
    "actor_init_on_gpu": "host memory",
    "overlap_comm": "backward pass",
    "loss_scale": "float16",
    "fp16_full_eval": "model.dtype",
}


@pytest.mark.parametrize(("name", "keys"), MEANT.items())
def test_names_mean_what_they_mean_there(name: str, keys: str) -> None:
    found = find(RLConfig, name)
    assert list(found.keys) == keys.split() and found.sure


@pytest.mark.parametrize(("name", "reason"), ABSENT.items())
def test_settings_that_are_not_here_have_a_reason(name: str, reason: str) -> None:
    found = find(RLConfig, name)
    assert not found.keys and reason in found.why


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        ("dpo", "beta", "dpo.beta"),
        ("kto", "beta", "kto.beta"),
        ("rft", "num_generations", "sampling.n"),
        ("generate", "max_completion_length", "sampling.max_new_tokens"),
        ("dpo", "loss_type", "dpo.loss"),
        ("sft", "max_seq_length", "data.max_tokens"),
        ("distill", "teacher_model_name_or_path", "teacher.path"),
    ],
)
def test_the_command_decides_between_meanings(kind: str, name: str, key: str) -> None:
    assert find(KINDS[kind], name).keys == (key,)


def test_a_setting_of_another_command_is_named_with_it() -> None:
    found = find(SFTConfig, "num_generations")
    assert not found.keys and found.elsewhere == ("rollout.group_size", "sampling.n")
    message = refused("train.num_generations=4", kind=SFTConfig)
    assert "rollout.group_size" in message and "tunesmith rl" in message


def test_the_data_leads_to_keys_that_exist_and_says_each_thing_once() -> None:
    assert len(meanings()) > 150
    for meaning in meanings():
        assert bool(meaning.keys) != bool(meaning.why), meaning
        assert set(meaning.keys) <= KEYS, meaning
        assert not meaning.convert or meaning.convert in CONVERSIONS, meaning
        assert bool(meaning.why) >= (meaning.derived or bool(meaning.effect)), meaning
        assert meaning.names and set(meaning.names) <= {*FRAMEWORKS, EARLIER}
        assert sum(map(bool, (meaning.how, meaning.value, meaning.inverted))) <= 1, meaning
        if meaning.value:
            kinds = [KINDS[commands_with(key)[0]] for key in meaning.keys]
            assert all(
                meaning.value in choices_at(kind, tuple(key.split(".")))
                for kind, key in zip(kinds, meaning.keys, strict=True)
            ), meaning
    seen: dict[tuple[str, str, str], list[object]] = defaultdict(list)
    for meaning in meanings():
        for framework, names in meaning.names.items():
            for name in names:
                commands = {c for key in meaning.keys for c in commands_with(key)} or {"absent"}
                for command in (
                    commands & set(meaning.commands.split()) if meaning.commands else commands
                ):
                    seen[framework, name, command].append(meaning.keys)
    assert not [where for where, found in seen.items() if len(found) > 1]


def test_values_of_other_frameworks_are_valid_here() -> None:
    for key, values in foreign_values().items():
        choices = choices_at(RLConfig, tuple(key.split("."))) or choices_at(
            KINDS["dpo"], tuple(key.split("."))
        )
        assert key in KEYS and (not choices or set(values) <= set(choices)), key
    assert value_of("model.dtype", "bf16") == "bfloat16"
    assert value_of("algorithm.kl.estimator", "low_var_kl") == "k3"
    assert 'Write "bfloat16"' in refused("model.dtype=bf16", "reward.functions=['math']")
    assert 'Write "token_mean"' in refused(
        "algorithm.aggregation=token-mean", "reward.functions=['math']"
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.learning_rate=1", "train.lr"),
        ("learning_rate=1", "train.lr"),
        ("system.learning-rate=1", "train.lr"),
        ("actor_rollout_ref.actor.optim.lr=1", "train.lr"),
        ("++actor_rollout_ref.actor.optim.lr=1", "train.lr"),
        ("ds.lora.rank=8", "lora.rank"),
        ("rollout.clip-ratio-low=0.2", "algorithm.loss.clip_low"),
        ("train.temprature=1", "rollout.temperature"),
        ("trian.steps=1", "train.steps"),
        ("rollout.Group_Size=4", "rollout.group_size"),
    ],
)
def test_names_are_answered_wherever_they_stand(override: str, key: str) -> None:
    message = refused(override, "reward.functions=['math']")
    told = message.partition("': ")[2].replace(override.partition("=")[0].lstrip("+"), "")
    assert re.search(rf"(^| |'){re.escape(key)}($|[ ?':.])", told), message


def test_every_key_of_a_table_is_answered_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\npath = "org/m"\n[data]\ntrain = "train.jsonl"\n[reward]\nfunctions = ["math"]\n'
        "[actor_rollout_ref.actor]\nclip_ratio_low = 0.2\noptim.lr = 1e-6\nzzz = 1\n[ds]\n"
        "zero_stage = 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, run)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().partition(":")[0] for line in lines] == [
        "line 8",
        "line 9",
        "line 10",
        "line 12",
    ]
    assert (
        "algorithm.loss.clip_low" in lines[0]
        and "train.lr" in lines[1]
        and "system.zero_stage" in lines[3]
    )


def test_a_table_is_answered_by_its_keys_or_as_a_whole() -> None:
    message = refused(
        "ds.lora={rank = 8, zzz = 1}",
        "zero_optimization.offload_optimizer={device = 'cpu'}",
        "lr_scheduler_kwargs={min_lr = 1e-6}",
        "reward.functions=['math']",
    )
    assert "did you mean lora.rank" in message and "unknown key ds.lora.zzz." in message
    assert (
        "zero_optimization.offload_optimizer.device is called system.offload_optimizer" in message
    )
    assert "lr_scheduler_kwargs.min_lr is called train.min_lr_ratio" in message


WORDS = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"), min_size=3, max_size=14)


@settings(deadline=None, max_examples=200)
@given(
    WORDS.filter(lambda w: not meanings_of(w)[1]),
    st.sampled_from(["train", "system", "rollout", "algorithm"]),
)
@pytest.mark.more
def test_a_hint_is_for_the_word_and_not_for_its_section(word: str, section: str) -> None:
    """A word that is like no key gets no "did you mean", whatever section it stands in."""
    if any(word == key.rpartition(".")[2] for key in KEYS):
        return
    message = refused(f"{section}.{word}=1", "reward.functions=['math']")
    hint = re.search(r"[Dd]id you mean '([\w.]+)'", message)
    if hint:
        import difflib

        assert difflib.SequenceMatcher(None, word, hint[1].rpartition(".")[2]).ratio() >= 0.69, (
            message
        )


@pytest.mark.parametrize(
    "wrong", ["train.wandboo", "train.frobnicate", "system.colocation_xy", "train.quantiles"]
)
def test_no_hint_is_better_than_a_wrong_one(wrong: str) -> None:
    assert "did you mean" not in refused(f"{wrong}=1", "reward.functions=['math']").lower()


def test_sections_of_other_commands_are_named_with_them() -> None:
    message = refused("reward.functions=['math']", kind=KINDS["dpo"])
    assert "[reward]" in message and "tunesmith dpo" in message and "tunesmith rl" in message
    assert all(kind.command == name for name, kind in KINDS.items())


def test_the_lists_are_read_from_sources(tmp_path: Path) -> None:
    source = tmp_path / "config.py"
    source.write_text(
        "class AConfig:\n    lr: float = 1\n    _hidden: int = 0\n    kinds: ClassVar[int] = 1\n"
        "    stage3_x: int = Field(1, alias='stage_x')\nclass Other:\n    no: int = 1\n"
        "parser.add_argument('--eps.clip', type=float)\nparser.add_argument(f'--{prefix}.lr')\n"
    )
    assert list(fields(source)) == ["lr", "stage_x"]
    assert list(options(source)) == ["eps.clip", "actor.lr", "critic.lr"]
    assert list(leaves({"a": {"b": 1, "_target_": "x"}, "defaults": [], "c": {}})) == ["a.b", "c"]


def parsed(command: str, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``tunesmith COMMAND ...`` says of arguments that it refuses."""
    from tunesmith.cli.main import app

    with pytest.raises(SystemExit) as ended:
        app([command, *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_options_of_other_frameworks_are_answered_with_overrides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = parsed(
        "rl",
        [
            "run.toml",
            "--lr",
            "1e-5",
            "--num-generations=8",
            "--ds.load_in_4bit",
            "--disable_tqdm",
            "true",
            "--clip_ratio",
            "0.2",
            "--actor.eps_clip_low_high",
            "0.2",
            "0.28",
            "--ds.zero_stage",
            "3",
            "--nonsense",
        ],
        capsys,
    )
    lines = {
        line.split(":")[0].split()[0]: line for line in said.splitlines() if line.startswith("  --")
    }
    assert len(lines) == 8
    assert lines["--lr"].endswith("write train.lr=1e-5")
    assert lines["--num-generations"].endswith("write rollout.group_size=8")
    assert lines["--ds.load_in_4bit"].endswith("write model.quantize=nf4")
    assert "monitor.progress=false" in lines["--disable_tqdm"]
    assert lines["--clip_ratio"].endswith(
        "write algorithm.loss.clip_low=0.2 algorithm.loss.clip_high=0.2"
    )
    assert (
        "algorithm.loss.clip_low and algorithm.loss.clip_high" in lines["--actor.eps_clip_low_high"]
    )
    assert "system.zero_stage" in lines["--ds.zero_stage"] and "unknown" in lines["--nonsense"]


def test_a_command_s_own_options_are_suggested_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = parsed(
        "launch", ["slurm", "run.toml", "--node", "2", "--gpus_per_node", "8", "--lr", "1"], capsys
    )
    assert (
        "did you mean --nodes?" in said
        and "did you mean --gpus-per-node?" in said
        and "train.lr=1" in said
    )


def test_settings_are_completed() -> None:
    from tunesmith.cli.arguments import complete_setting

    assert complete_setting("train.l") == ["train.lr="]
    assert "rollout.group_size=" in complete_setting("roll") and not complete_setting("zzz")


@pytest.mark.parametrize("command", [*KINDS, "config"])
def test_every_command_answers_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = ["run"] if command == "rft" else []
    said = parsed(command, [*first, "run.toml", "--learning_rate", "1e-5"], capsys)
    assert "write train.lr=1e-5" in said


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("trainn", "sft"),
        ("help", "--help"),
        ("grpo", "algorithm.name=grpo"),
        ("rll", "rl"),
        ("confg", "config"),
        ("eval", "generate"),
        ("resume", "checkpoint.resume=true"),
        ("gguf", "export"),
        ("logs", "runs tail"),
        ("sbatch", "launch slurm"),
    ],
)
def test_mistyped_commands_get_a_suggestion(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(rf"Did you mean tunesmith .*{re.escape(meant)}", parsed(word, [], capsys))


def test_an_unknown_command_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean" not in parsed("qqqqqq", [], capsys)


def test_an_override_in_the_place_of_the_run_file_is_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = parsed("rl", ["run_dir=x"], capsys)
    assert "the run file is missing" in said and "tunesmith rl RUN.toml run_dir=x" in said


def test_presets_and_choices_are_found_whatever_their_letters() -> None:
    for name, ours in (("GRPO", "'grpo'"), ("reinforce++", '"reinforce_pp"')):
        assert ours in refused(f"algorithm.name={name}")


def test_the_examples_of_the_page_say_the_same_on_both_sides() -> None:
    """Each setting of the other framework has its key in the run file that follows it."""
    blocks = [
        b for b in blocks_of(ROOT / "docs" / "coming-from.md") if b.language in ("text", "toml")
    ]
    pairs = [
        (a.text, b.text)
        for a, b in pairwise(blocks)
        if (a.language, b.language) == ("text", "toml")
    ]
    pairs = [
        (theirs, ours) for theirs, ours in pairs if not ours.startswith("# From")
    ]  # which was migrated
    assert len(pairs) == 3
    for theirs, ours in pairs:
        paths = [path[:length] for path in key_lines(ours) for length in range(1, len(path) + 1)]
        said = {dotted(path) for path in paths} | {
            re.sub(r"\[\d+\]", "", dotted(path)) for path in paths
        }
        names = re.findall(r"--([\w.]+)", theirs) or re.findall(r"(?<![\w.])([\w.]+)=", theirs)
        told = [name for name in names if name not in ("args", "model")]
        assert len(told) > 10
        for name in told:
            assert set(find(RLConfig, name).keys) & said, name


def test_the_tables_of_the_page_have_the_keys_that_names_lead_to() -> None:
    rows = re.findall(
        r"^\| (`.+?) \| (.*?) \|", (ROOT / "docs" / "coming-from.md").read_text(), re.MULTILINE
    )
    assert 40 < len(rows) < 80
    for theirs, ours in rows:
        keys = set(re.findall(r"`(.+?)`", ours))
        assert keys <= KEYS | {"run_dir"}, theirs
        for name in re.findall(r"`(.+?)`", theirs):
            named = {key for meaning in meanings_of(name)[1] for key in meaning.keys}
            assert named & keys or not (named or keys), name
