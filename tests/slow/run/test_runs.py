"""Small whole runs in this process: every preset, evaluation, sinks, data formats, and that they
learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import REWARDS, rl_settings, sft_settings, sums, untimed, write_lines
from tunesmith.errors import ConfigError, RewardError
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.loop.checkpoint import Checkpoints, read_state


def rl(
    folder: Path, model: Path, run: str = "run", **changed: Any
) -> tuple[assembly.RunResult, list[dict[str, Any]]]:
    outcome = assembly.run_rl(None, rl_settings(folder, model, run, **changed))
    return outcome, [
        line for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "reward" in line
    ]


ALWAYS = {
    "step",
    "time",
    "rollouts",
    "tokens",
    "completion_tokens",
    "completion_tokens_max",
    "truncated",
    "reward",
    "reward/std",
    "reward/share/mean",
    "epoch",
    "completion_tokens_min",
    "reward/share/applied",
    "rollouts/failed",
    "groups_kept",
    "total_tokens",
    "entropy",
    "policy_kl",
    "loss",
    "policy_loss",
    "grad_norm",
    "lr",
    "optimizer_steps",
    "microbatches",
    "trained_tokens",
    "tokens_per_second",
    "limit_share",
    "seconds",
    "seconds/rollout",
    "seconds/train",
    "seconds/sync",
    "seconds/other",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed", "more"),
    [
        ("grpo", {}, {"clip_low", "clip_high"}),
        ("dr_grpo", {}, set[str]()),
        ("rloo", {"algorithm__kl__coef": 0.1, "algorithm__kl": "reward"}, {"ref_kl"}),
        ("reinforce", {"rollout__group_size": 1, "rollout__prompts_per_step": 8}, set[str]()),
        ("grpo", {"algorithm__kl__coef": 0.1, "algorithm__kl": "loss"}, {"ref_kl"}),
        (
            "grpo",
            {
                "algorithm__kl__coef": 0.1,
                "algorithm__kl__target": 0.01,
                "algorithm__kl__horizon": 100,
            },
            {"kl_coef"},
        ),
        ("grpo", {"algorithm__entropy_coef": 0.01}, set[str]()),
        ("grpo", {"train__passes_per_batch": 2, "train__batch_size": 8}, set[str]()),
        (
            "grpo",
            {"algorithm__decoupled": True, "algorithm__correction": "token_truncate"},
            set[str](),
        ),
        ("grpo", {"system__gradient_checkpointing": True, "system__logprob_chunk": 16}, set[str]()),
    ],
)
def test_presets_run_and_tell_what_they_should(
    tmp_path: Path, model: Path, name: str, changed: dict[str, Any], more: set[str]
) -> None:
    _, lines = rl(tmp_path, model, algorithm__name=name, train__steps=2, **changed)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        missing = (ALWAYS | more) - line.keys()
        assert not missing
        assert line["rollouts"] in (8, 16) and 0 <= line["reward"] <= 1
        assert line["completion_tokens"] <= 8 and line["grad_norm"] > 0
        parts = sum(value for key, value in line.items() if key.startswith("seconds/"))
        assert line["seconds"] == pytest.approx(parts)
    assert lines[0]["optimizer_steps"] == (4 if "train__batch_size" in changed else 1)
    if "ref_kl" in more:
        assert lines[0]["ref_kl"] == pytest.approx(0, abs=1e-5) and lines[1]["ref_kl"] > 0


def test_dapo_replaces_groups_without_contrast_and_shapes_long_answers(
    tmp_path: Path, model: Path
) -> None:
    rl_settings(tmp_path, model)
    outcome, lines = rl(
        tmp_path,
        model,
        algorithm__name="dapo",
        algorithm__overlong__buffer=4,
        rollout__prompts_per_step=3,
        reward__functions=[f"{tmp_path}/rewards.py:sometimes"],
        monitor__samples=20,
    )
    for line in lines:
        assert 0 < line["groups_kept"] <= 1
        assert line["rollouts"] >= 12, "what was tried, kept or not"
    assert any(line["rollouts"] > 12 for line in lines)
    assert len(read_metrics(outcome.run_dir / "rollouts.jsonl")) > 0


def test_dapo_takes_its_papers_reward_of_plus_and_minus_one_and_replaces_groups_of_equal_middle_ones(
    tmp_path: Path, model: Path
) -> None:
    """arXiv:2503.14476, equation 7. The odd tasks are always half right."""
    rl_settings(tmp_path, model)
    (tmp_path / "rewards.py").write_text(
        "def signs(completions, answer, **_):\n"
        "    return [0.5 if int(a) % 4 else 2.0 * (text[:1] < 'P') - 1 for text, a in "
        "zip(completions, answer)]\n"
    )
    outcome, lines = rl(
        tmp_path,
        model,
        algorithm__name="dapo",
        algorithm__overlong__buffer=4,
        rollout__prompts_per_step=2,
        train__steps=2,
        reward__functions=[f"{tmp_path}/rewards.py:signs"],
        monitor__samples=20,
    )
    trained = read_metrics(outcome.run_dir / "rollouts.jsonl")
    assert len(trained) > 0 and any(line["groups_kept"] < 1 for line in lines)
    by_task: dict[str, set[float]] = {}
    for told in trained:
        by_task.setdefault(str(told["prompt"]), set()).add(told["rewards"]["signs"])
    assert set().union(*by_task.values()) <= {-1.0, 1.0}


def test_filtering_ends_when_the_data_is_exhausted(tmp_path: Path, model: Path) -> None:
    """A reward that is always the same leaves nothing to learn: no optimizer step, and no endless
    search."""
    rl_settings(tmp_path, model)
    (tmp_path / "rewards.py").write_text(
        "def same(completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    outcome, lines = rl(
        tmp_path, model, algorithm__name="dapo", algorithm__overlong__buffer=2, train__steps=2,
        reward__functions=[f"{tmp_path}/rewards.py:same"],
    )  # fmt: skip
    assert [line["rollouts"] for line in lines] == [48, 48], (
        "all 12 tasks once a step, four rollouts each"
    )
    assert [line["optimizer_steps"] for line in lines] == [0, 0] and lines[0]["groups_kept"] == 0
    assert read_state(outcome.checkpoint.parent)["step"] == 2


def test_a_step_whose_rollouts_all_fail_is_no_step_or_ends_the_run(
    tmp_path: Path, model: Path
) -> None:
    rl_settings(tmp_path, model)
    (tmp_path / "rewards.py").write_text(
        "def broken(completions, **_):\n    raise ValueError('no such answer')\n"
    )
    functions = [f"{tmp_path}/rewards.py:broken"]
    settings = rl_settings(
        tmp_path, model, reward__functions=functions, reward__max_failed_share=1.0, train__steps=2
    )
    outcome = assembly.run_rl(None, settings)
    lines = read_metrics(outcome.run_dir / "metrics.jsonl")
    assert [line["rollouts/failed"] for line in lines] == [1.0, 1.0]
    assert all(line["optimizer_steps"] == 0 and "reward" not in line for line in lines)
    told = read_metrics(outcome.run_dir / "rollouts.jsonl")
    assert len(told) == 32 and "no such answer" in told[0]["error"] and told[0]["reward"] is None
    decoupled = rl_settings(
        tmp_path,
        model,
        "decoupled",
        reward__functions=functions,
        reward__max_failed_share=1.0,
        train__steps=1,
        algorithm__decoupled=True,
        algorithm__kl__coef=0.1,
    )
    assembly.run_rl(None, decoupled)
    with pytest.raises(RewardError, match=r"16 of 16 rollouts failed(.|\n)*no such answer"):
        assembly.run_rl(None, rl_settings(tmp_path, model, "strict", reward__functions=functions))


def test_some_failures_leave_the_others_to_learn_from(tmp_path: Path, model: Path) -> None:
    rl_settings(tmp_path, model)
    (tmp_path / "rewards.py").write_text(
        "def share(completions, **_):\n"
        "    return [float('nan') if 'A' < t[:1] < 'a' else len(t) / 8 for t in completions]\n"
    )
    _, lines = rl(tmp_path, model, reward__max_failed_share=1.0, train__batch_size=8)
    assert any(0 < line["rollouts/failed"] < 1 for line in lines)
    assert all(line["optimizer_steps"] > 0 for line in lines)


def test_the_reward_rises(tmp_path: Path, model: Path) -> None:
    """Bytes of the first half of the alphabet are rewarded: a few steps make them likelier."""
    _, lines = rl(
        tmp_path,
        model,
        algorithm__name="grpo",
        rollout__group_size=8,
        train__steps=12,
        train__lr=2e-2,
    )
    first, last = (sum(line["reward"] for line in part) / 3 for part in (lines[:3], lines[-3:]))
    assert last > first + 0.25, (first, last)
    assert lines[-1]["seconds/rollout"] > 0


def test_evaluation_keeps_the_best_checkpoint(tmp_path: Path, model: Path) -> None:
    rl_settings(tmp_path, model)
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(5, 50))
    outcome, _ = rl(
        tmp_path, model, data__eval=str(held_out), eval__every=1, eval__samples=2, train__steps=4,
        checkpoint__every=1, checkpoint__keep=1,
    )  # fmt: skip
    rows = outcome.evaluations
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        assert {
            "eval/reward",
            "eval/accuracy",
            "eval/length",
            "eval/failed",
            "eval/pass@1",
            "eval/pass@2",
        } <= row.keys()
        assert row["eval/pass@1"] <= row["eval/pass@2"]
    trained = rows[1:]
    best = max(rows, key=lambda row: (row["eval/reward"], -row["step"]))
    kept = Checkpoints(outcome.run_dir / "checkpoints", 1).steps()
    assert kept == sorted({4} | ({best["step"]} if best in trained else set()))
    assert read_state(outcome.checkpoint.parent)["best"] == {
        "eval/reward": [best["eval/reward"], best["step"]]
    }


def test_evaluation_between_steps_is_not_counted_as_theirs(tmp_path: Path, model: Path) -> None:
    rl_settings(tmp_path, model)
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(12))
    (tmp_path / "logs.py").write_text(
        "def alone(completions, log_metric, **_):\n"
        "    log_metric('alone', len(completions) == 1)\n"
        "    return [0.0] * len(completions)\n"
    )
    rewards = [f"{tmp_path / 'logs.py'}:alone"]
    _, lines = rl(
        tmp_path, model, data__eval=str(held_out), eval__every=1, reward__functions=rewards
    )
    assert all(line["sampled_tokens"] == line["tokens"] for line in lines)
    assert all(line["logged/alone"] == 0 for line in lines)
    for line in lines:
        beside = sum(line.get(f"seconds/{name}", 0.0) for name in ("setup", "eval", "checkpoint"))
        assert line["tokens_per_second"] == pytest.approx(
            line["tokens"] / (line["seconds"] - beside)
        )
        assert 0 < line["limit_share"] < 1


def test_the_target_ends_the_run_early_with_a_checkpoint(tmp_path: Path, model: Path) -> None:
    rl_settings(tmp_path, model)
    held_out = str(write_lines(tmp_path / "held_out.jsonl", sums(3, 50)))
    outcome, lines = rl(
        tmp_path,
        model,
        data__eval=held_out,
        eval__every=1,
        eval__target=-1.0,
        eval__at_start=False,
        train__steps=9,
    )
    assert len(lines) == 1 and outcome.checkpoint.parent.name == "step-000001"
    at_once, lines = rl(
        tmp_path, model, "second", data__eval=held_out, eval__every=1, eval__target=-1.0
    )
    assert not lines and at_once.checkpoint.parent.name == "step-000000", (
        "reached before the first step"
    )
    assert (at_once.checkpoint / "config.json").is_file()


def test_an_unknown_metric_for_the_best_is_refused_at_the_first_evaluation(
    tmp_path: Path, model: Path
) -> None:
    rl_settings(tmp_path, model)
    held_out = str(write_lines(tmp_path / "held_out.jsonl", sums(3, 50)))
    with pytest.raises(ConfigError, match=r"eval/acuracy.*Did you mean 'eval/accuracy'"):
        rl(tmp_path, model, data__eval=held_out, eval__metric="eval/acuracy")


def test_tensorboard_gets_the_metrics(tmp_path: Path, model: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    outcome, lines = rl(tmp_path, model, monitor__sinks=["tensorboard"])
    events = event_accumulator.EventAccumulator(str(outcome.run_dir / "tensorboard"))
    events.Reload()
    points = [(e.step, e.value) for e in events.Scalars("reward")]
    assert points == [(line["step"], pytest.approx(line["reward"])) for line in lines]


def test_the_same_seed_gives_the_same_run_and_the_system_changes_rounding_only(
    tmp_path: Path, model: Path
) -> None:
    def course(run: str, **changed: Any) -> list[dict[str, Any]]:
        return untimed(rl(tmp_path, model, run, **changed)[0].run_dir / "metrics.jsonl")

    first = course("a")
    assert course("b") == first
    assert course("c", train__seed=1) != first
    cut = course(
        "d",
        system__max_tokens_per_microbatch=32,
        system__share_prompts=False,
        system__max_running=3,
    )
    for ours, theirs in zip(cut, first, strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["microbatches"] > theirs["microbatches"]


CHAT = [
    {
        "messages": [
            {"role": "user", "content": s["prompt"]},
            {"role": "assistant", "content": s["answer"]},
        ]
    }
    for s in sums(12)
]
FORMATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": s["prompt"] + s["answer"]} for s in sums(12)],
    "completion": [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(12)],
    "messages": CHAT,
}


@pytest.mark.parametrize("form", FORMATS)
def test_sft_learns_from_every_format(tmp_path: Path, model: Path, form: str) -> None:
    data = write_lines(tmp_path / "data.jsonl", FORMATS[form])
    held_out = write_lines(tmp_path / "held_out.jsonl", FORMATS[form][:4])
    settings = sft_settings(
        tmp_path,
        model,
        data__train=str(data),
        data__eval=str(held_out),
        data__chat=None,
        eval__every=4,
        train__steps=12,
    )
    outcome = assembly.run_sft(None, settings)
    lines = [line for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 12
    keys = {
        "loss",
        "nll",
        "tokens",
        "epoch",
        "tokens_per_second",
        "limit_share",
        "seconds/train",
        "lr",
        "grad_norm",
    }
    assert all(keys <= line.keys() for line in lines)
    losses = [row["eval/loss"] for row in outcome.evaluations]
    assert len(losses) == 4 and losses[0] == pytest.approx(5.7, abs=0.3), "about log 300 before"
    assert losses[-1] < losses[0] - 1.5 and lines[-1]["loss"] < lines[0]["loss"] - 1.5


def test_sft_loss_counts_each_loss_token_once(tmp_path: Path, model: Path) -> None:
    """A batch of unequal lengths in one micro-batch or in many is the mean over its tokens."""
    data = write_lines(tmp_path / "data.jsonl", [{"text": "a" * n} for n in (3, 9, 27, 40)])

    def first_loss(run: str, cap: int) -> dict[str, Any]:
        settings = sft_settings(
            tmp_path, model, run, data__train=str(data), train__batch_size=4, train__steps=1,
            system__max_tokens_per_microbatch=cap,
        )  # fmt: skip
        return read_metrics(assembly.run_sft(None, settings).run_dir / "metrics.jsonl")[0]

    whole = first_loss("one", 512)
    cut = first_loss("many", 42)
    assert whole["loss"] == pytest.approx(cut["loss"], rel=1e-6)
    assert cut["microbatches"] > whole["microbatches"] == 1


def test_a_long_line_of_the_held_out_set_is_refused_before_training(
    tmp_path: Path, model: Path
) -> None:
    held_out = write_lines(tmp_path / "held_out.jsonl", [{"prompt": "a" * 300, "completion": "b"}])
    settings = sft_settings(
        tmp_path, model, data__eval=str(held_out), system__max_tokens_per_microbatch=100
    )
    with pytest.raises(ValueError, match=r"held_out\.jsonl:1: 30\d tokens, the limit is 100"):
        assembly.run_sft(None, settings)
    assert not (tmp_path / "sft/metrics.jsonl").exists()


def test_skipping_too_long_lines_needs_no_limit_of_ones_own(tmp_path: Path, model: Path) -> None:
    lines = [{"text": "ab"}, {"text": "a" * 900}, {"text": "cd"}]
    data = write_lines(tmp_path / "data.jsonl", lines)
    settings = sft_settings(
        tmp_path, model, data__train=str(data), data__too_long="skip", train__batch_size=2
    )
    outcome = assembly.run_sft(None, settings)
    assert "data.jsonl:2" in (outcome.run_dir / "skipped.jsonl").read_text()


def test_a_column_that_only_the_held_out_data_lacks_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1=", "gold": "2"}\n')
    settings = rl_settings(
        tmp_path, save_model(tmp_path / "model"), data__eval=str(tmp_path / "held_out.jsonl")
    )
    reward = "def share(completions, answer, **columns):\n    return [0.0 for _ in completions]\n"
    (tmp_path / "rewards.py").write_text(reward)
    with pytest.raises(ConfigError, match=r"'answer', which data\.eval lacks"):
        assembly.run_rl(None, settings)


def test_rewards_are_told_the_step_also_in_evaluations(tmp_path: Path) -> None:
    settings = rl_settings(tmp_path, save_model(tmp_path / "model"))
    (tmp_path / "rewards.py").write_text(
        "def share(completions, trainer_state, **columns):\n"
        f"    with open({str(tmp_path / 'told')!r}, 'a') as told:\n"
        "        print(len(completions), trainer_state.global_step, file=told)\n"
        "    return [len(text) / 8 for text in completions]\n"
    )
    held_out = str(write_lines(tmp_path / "held_out.jsonl", sums(1, 60)))
    more = [f'data.eval="{held_out}"', "eval.every=1", "train.steps=2"]
    assembly.run_rl(None, [*settings, *more])
    assembly.run_rl(None, [*settings, *more, "checkpoint.resume=true", "train.steps=3"])
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert [step for size, step in told if size == "1"] == ["0", "1", "2", "3"]
    assert [step for size, step in told if size == "4"] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4


def test_rewards_that_fail_end_the_run_with_its_last_step_saved(tmp_path: Path) -> None:
    settings = rl_settings(tmp_path, save_model(tmp_path / "model"))
    (tmp_path / "rewards.py").write_text(
        "def share(completions, trainer_state, **columns):\n"
        "    if trainer_state.global_step == 2:\n"
        "        raise OSError('the server is down')\n"
        "    return [len(text) / 8 for text in completions]\n"
    )
    with pytest.raises(RewardError, match="the server is down"):
        assembly.run_rl(None, settings)
    assert Checkpoints(tmp_path / "run/checkpoints", 2).steps() == [2]
    (tmp_path / "rewards.py").write_text(REWARDS)
    outcome = assembly.run_rl(None, [*settings, "checkpoint.resume=true"])
    assert outcome.checkpoint.parent.name == "step-000003"


def test_an_evaluation_of_which_every_rollout_fails_ends_the_run_with_the_reason(
    tmp_path: Path,
) -> None:
    held_out = str(tmp_path / "train.jsonl")
    settings = rl_settings(tmp_path, save_model(tmp_path / "model"), data__eval=held_out)
    (tmp_path / "rewards.py").write_text(
        "def share(completions, **columns):\n    raise ValueError('no such tool')\n"
    )
    with pytest.raises(RewardError, match=r"evaluation failed[\s\S]*no such tool"):
        assembly.run_rl(None, settings)
