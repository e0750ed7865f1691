"""A run that learns nothing says so, with the cause; one that learns does not. Real small runs, one
per cause."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_runs import rl_settings, sft_settings, write_lines
from tunesmith.records.doctor.learning import LearningWatch, at_the_end, finding
from tunesmith.records.facts import RunFacts
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

REWARDS = """\
import time

def zero(completions, **_):
    return [0.0 for _ in completions]


def one(completions, **_):
    return [1.0 for _ in completions]


def half(completions, **_):
    return [0.5 for _ in completions]


def length(completions, **_):
    return [float(len(set(text))) for text in completions]


def by_prompt(prompts, completions, **_):
    return [float(len(prompt) % 3) for prompt in prompts]


def broken(completions, **_):
    raise ValueError("no")


def high_bytes(completions, **_):
    return [sum(c > "M" for c in text) / max(1, len(text)) for text in completions]
"""


def watched(monkeypatch: pytest.MonkeyPatch) -> list[LearningWatch]:
    """The watches of the runs to come."""
    made = list[LearningWatch]()
    begin = LearningWatch.__init__

    def kept(self: LearningWatch, facts: RunFacts) -> None:
        begin(self, facts)
        made.append(self)

    monkeypatch.setattr(LearningWatch, "__init__", kept)
    return made


def rl(folder: Path, model: Path, reward: str, **changed: Any) -> assembly.RunResult:
    rl_settings(folder, model)
    (folder / "judge.py").write_text(REWARDS)
    functions = [f"{folder / 'judge.py'}:{reward}"]
    settings = {"reward__functions": functions, "train__steps": 3, **changed}
    return assembly.run_rl(None, rl_settings(folder, model, **settings))


RL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "always_wrong": ("zero", {"rollout__stop_token_ids": list(range(3, 200))}),
    "always_right": ("one", {}),
    "constant_reward": ("half", {}),
    "failing": ("broken", {"reward__max_failed_share": 1.0}),
    "truncated": ("zero", {"rollout__max_new_tokens": 1}),
    "equal_answers": ("by_prompt", {"rollout__temperature": 0.01}),
    "lr_without_effect": ("high_bytes", {"train__lr": 1e-12}),
    "no_samples": ("length", {"rollout__max_new_tokens": 1, "algorithm__mask_truncated": True}),
}


@pytest.mark.parametrize("cause", RL_CASES)
@pytest.mark.more
def test_a_run_that_learns_nothing_says_why(
    tmp_path: Path, model: Path, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, changed = RL_CASES[cause]
    if cause == "equal_answers":  # prompts of different lengths
        write_lines(
            tmp_path / "train.jsonl", [{"prompt": "7" * n, "answer": "1"} for n in range(1, 13)]
        )
        (tmp_path / "rewards.py").write_text("")
    outcome = rl(tmp_path, model, reward, **changed)
    out = capsys.readouterr().out
    assert out.count("warning: nothing is learned") == 1, "once, not at every step"
    facts = RunFacts(rollouts=True, full_reward=1.0, max_new_tokens=8)
    steps = [line for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "rollouts" in line]
    if cause not in ("lr_without_effect", "equal_answers"):
        found = finding(steps, facts)
        assert found is not None and found.key == cause
    assert outcome.warning is not None, "and again at the end"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("a healthy run", {}),
        (
            "a critic that learns first",
            {"algorithm__name": "ppo", "critic__freeze_actor_steps": 3, "train__steps": 4},
        ),
        ("a warm-up", {"train__warmup_steps": 3}),
        ("a dynamic filter", {"algorithm__name": "dapo", "rollout__oversample": 1.5}),
        (
            "one step behind",
            {
                "rollout__max_staleness": 1,
                "rollout__partial": True,
                "rollout__over_generation": 1.5,
            },
        ),
        (
            "no groups",
            {
                "algorithm__name": "reinforce",
                "rollout__group_size": 1,
                "rollout__prompts_per_step": 8,
            },
        ),
    ],
)
@pytest.mark.more
def test_a_run_that_learns_is_left_alone(
    tmp_path: Path,
    model: Path,
    name: str,
    changed: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = rl(tmp_path, model, "high_bytes", **changed)
    assert "nothing is learned" not in capsys.readouterr().out and outcome.warning is None, name


def test_a_learning_rate_that_ruins_the_policy_is_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = rl(tmp_path, model, "high_bytes", train__lr=10.0, train__steps=8)
    assert outcome.warning is not None and "train.lr" in outcome.warning
    assert "nothing is learned" in capsys.readouterr().out


def test_prompts_of_unknown_tokens_are_said_before_anything_loads(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(here)
    tokenizer.unk_token = "7"  # what the tokenizer gives for a character that it lacks
    tokenizer.save_pretrained(here)
    write_lines(
        tmp_path / "train.jsonl", [{"prompt": "7" * n, "answer": "1"} for n in range(4, 16)]
    )
    (tmp_path / "rewards.py").write_text("")
    outcome = rl(tmp_path, here, "zero")
    out = capsys.readouterr().out
    assert out.index("unknown to the tokenizer") < out.index("run directory")
    assert outcome.warning is not None and "unknown to the tokenizer" in outcome.warning


@pytest.mark.parametrize(
    ("cause", "changed"),
    [
        ("lr_without_effect", {"train__lr": 1e-12}),
        ("lr_too_high", {"train__lr": 1.0, "train__steps": 12}),
    ],
)
def test_supervised_runs_say_it_too(
    tmp_path: Path,
    model: Path,
    cause: str,
    changed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watches = watched(monkeypatch)
    outcome = assembly.run_sft(None, sft_settings(tmp_path, model, **changed))
    assert outcome.warning is not None
    assert cause in {
        watches[0].reported,
        *(f.key for f in [at_the_end(watches[0].history, watches[0].facts)] if f),
    }


def test_a_healthy_supervised_run_is_left_alone(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = assembly.run_sft(
        None, sft_settings(tmp_path, model, train__steps=24, train__warmup_steps=4)
    )
    assert outcome.warning is None and "nothing is learned" not in capsys.readouterr().out


def steps_of(count: int, **metrics: float) -> list[Mapping[str, float]]:
    base = {
        "loss": 1.0,
        "grad_norm": 0.5,
        "optimizer_steps": 1.0,
        "rollouts": 16.0,
        "reward/std": 0.3,
        "reward": 0.5,
    }
    return [{"step": float(i), **base, **metrics} for i in range(1, count + 1)]


RL = RunFacts(rollouts=True, full_reward=1.0)


@pytest.mark.parametrize(
    ("metrics", "facts", "cause"),
    [
        ({}, RL, None),
        ({"groups_equal": 1.0}, RL, "equal_rewards"),
        ({"groups_equal": 1.0}, RunFacts(rollouts=True, compares_group=False), None),
        ({"groups_equal": 1.0}, RunFacts(rollouts=True, from_total=False), None),
        ({"groups_equal": 1.0, "entropy": 0.001}, RL, "equal_answers"),
        ({"reward/std": 0.0, "reward": -1.0}, RL, "constant_reward"),
        ({"reward/std": 0.0}, RunFacts(rollouts=True, rewarded=False), None),
        ({"skipped_steps": 1.0}, RL, "not_finite"),
        ({"policy_kl": 3.0}, RL, "lr_too_high"),
        ({"grad_norm": 0.0}, RunFacts(rollouts=True, frozen_steps=9), None),
        ({"grad_norm": 0.0}, RL, "no_gradient"),
        ({"loss": 1e-6, "grad_norm": 0.0}, RunFacts(), "known"),
        ({"grad_norm": 0.0}, RunFacts(), "no_gradient"),
    ],
)
def test_the_cause_by_the_numbers(
    metrics: dict[str, float], facts: RunFacts, cause: str | None
) -> None:
    found = finding(steps_of(3, **metrics), facts)
    assert (found and found.key) == cause
    assert finding(steps_of(2, **metrics), facts) is None, "not before the third step"


def test_what_was_lost_is_said_in_numbers() -> None:
    history = [*steps_of(2, reward=0.6), *steps_of(3, **{"reward": 0.0, "reward/std": 0.0})]
    found = finding(history, RL)
    assert found is not None and found.key == "ruined" and "0.6" in found.numbers


def test_a_loss_that_is_no_lower_at_the_end() -> None:
    history = steps_of(40)
    assert finding(history, RunFacts()) is None
    found = at_the_end(history, RunFacts())
    assert found is not None and found.key == "loss_does_not_fall"
    assert at_the_end([], RunFacts()) is None, "a finished run that is resumed takes no step"
    falling = [{**step, "loss": 2.0 - step["step"] / 40} for step in history]
    assert at_the_end(falling, RunFacts()) is None


def test_infinities_of_both_signs_end_no_run() -> None:
    watch = LearningWatch(RunFacts())
    for step, loss in zip(steps_of(30), [math.inf, -math.inf, *[1.0] * 27, math.inf], strict=True):
        watch.step({**step, "loss": loss})
    watch.end()


def test_a_finding_is_told_again_only_after_it_was_gone() -> None:
    watch = LearningWatch(RL)
    bad = steps_of(3, **{"reward/std": 0.0, "reward": 0.5})
    good = steps_of(1)
    told = [watch.step(step) is not None for step in [*bad, *bad, *good, *bad]]
    assert [i for i, was in enumerate(told) if was] == [2, 9]
    assert watch.end() is not None


def test_a_long_run_is_remembered_in_part() -> None:
    watch = LearningWatch(RunFacts())
    for number in range(10_000):
        watch.step({"step": float(number), "loss": 1.0, "grad_norm": 1.0})
    assert (
        len(watch.history) <= 4000
        and watch.history[0]["step"] == 0
        and watch.history[-1]["step"] == 9_999
    )
