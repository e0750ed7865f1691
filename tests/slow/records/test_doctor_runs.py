"""Real small runs: healthy ones, in which the doctor finds nothing, and one for each disease, which
it finds first."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import tunesmith.run.loop.rl
from tests.support.ill_runs import (
    RELEASED,
    Ward,
    engine_keeps_its_weights,
    engine_says,
    examples,
    little_memory,
    make_ward,
    skipping,
    slower_training,
    tasks,
)  # fmt: skip
from tests.support.tiny_preferences import RUNS, lines_of, preference_settings
from tests.support.tiny_runs import write_lines
from tunesmith.records.doctor.findings import diagnose
from tunesmith.records.doctor.record import read_record
from tunesmith.run.loop.checkpoint import Checkpoints
from tunesmith.run.loop.rollouts import SyncRollouts
from tunesmith.run.trainers.torch import TorchBackend

Injected = Callable[[], AbstractContextManager[None]]
Settings = dict[str, Any]

LITTLE: Settings = {"train__steps": 4}
FAILING: Settings = {"reward__max_failed_share": 1.0, "train__steps": 4}
HELD_OUT: Settings = {
    "data__eval": "held_out.jsonl",
    "eval__every": 6,
    "eval__max_prompts": 120,
    "train__steps": 12,
}
RAMBLING: Settings = {
    "model__path": "BLANK",
    "reward__functions": ["low"],
    "rollout__stop_token_ids": list(range(10, 25)),
    "rollout__max_new_tokens": 120,
    "train__lr": 1e-5,
}
"""Bytes without order, twenty on average."""
HEALTHY_RL: dict[str, Settings] = {
    "grpo": {},
    "dr_grpo": {"algorithm__name": "dr_grpo"},
    "dapo": {"algorithm__name": "dapo", "train__steps": 10},
    "gspo": {"algorithm__name": "gspo", "train__batch_size": 24},
    "rloo": {"algorithm__name": "rloo", "train__passes_per_batch": 2},
    "reinforce_pp": {"algorithm__name": "reinforce_pp"},
    "ppo": {"algorithm__name": "ppo", "critic__lr": 5e-3},
    "lora": {"lora__rank": 4, "train__lr": 1e-2},
    "engine apart, one step ahead": {"system__engine_process": True, "rollout__max_staleness": 1},
}
HEALTHY_DATA = ("sft", "dpo", "kto", "rm", "prm")

RL: dict[str, tuple[str, Settings] | tuple[str, Settings, Injected]] = {
    # of the learning rate and the optimizer
    "learning rate far too high": ("ruined", {"train__lr": 0.3, "train__steps": 10}),
    "learning rate of nothing": ("lr_without_effect", {"train__lr": 1e-9, "train__steps": 4}),
    "learning rate too low": ("reward_flat", {"train__lr": 1e-6}),
    "warm-up of a longer run": ("long_warmup", {"train__warmup_steps": 15}),
    "batch size counted for a device": ("many_small_steps", {"train__batch_size": 4, **LITTLE}),
    "large updates": (
        "large_updates",
        {
            "train__batch_size": 24,
            "train__passes_per_batch": 4,
            "train__lr": 5e-3,
            "train__steps": 6,
        },
    ),
    "narrow clipping": (
        "much_clipped",
        {
            "train__batch_size": 24,
            "train__passes_per_batch": 2,
            "algorithm__loss__clip_low": 0.005,
            "algorithm__loss__clip_high": 0.005,
            **LITTLE,
        },
    ),
    "gradients always cut": (
        "always_clipped",
        {"train__max_grad_norm": 0.01, "train__lr": 5e-4, "train__steps": 10},
    ),
    "gradients at times infinite": (
        "not_finite",
        {"algorithm__loss": "loss.py:AtTimesInfinite", "train__steps": 8},
    ),
    "gradients at times huge": (
        "spikes",
        {"algorithm__loss": "loss.py:AtTimesHuge", "train__steps": 24},
    ),
    "micro-batches too large": ("memory_retries", LITTLE, partial(little_memory, 128)),
    "threads for more cores": ("too_many_threads", {"system__threads": 16, "train__steps": 3}),
    # of rewards
    "reward always 0": ("always_wrong", {"reward__functions": ["zero"], **LITTLE}),
    "reward constant": ("constant_reward", {"reward__functions": ["half"], **LITTLE}),
    "one reward of two always 0": (
        "constant_reward",
        {"reward__functions": ["right", "zero"], **LITTLE},
    ),
    "reward raises at times": (
        "some_rollouts_fail",
        {"reward__functions": ["raises_at_times"], **FAILING},
    ),
    "reward raises": ("failing", {"reward__functions": ["raises"], **FAILING}),
    "reward is not a number": ("failing", {"reward__functions": ["not_a_number"], **FAILING}),
    "reward hangs at times": (
        "reward_threads_hang",
        {"reward__functions": ["hangs"], "reward__timeout": 0.3, **FAILING},
    ),
    "reward grows with length": (
        "length_is_rewarded",
        {
            "reward__functions": ["length"],
            "rollout__max_new_tokens": 16,
            "train__lr": 5e-3,
            "train__steps": 16,
            "monitor__samples": 4,
        },
    ),
    "reward for a shortcut": (
        "entropy_collapse",
        {"reward__functions": ["shortcut"], "train__lr": 5e-3, "train__steps": 30},
    ),
    "reward leads far away": (
        "policy_drifts",
        {
            "reward__functions": ["no_digit"],
            "algorithm__kl": "loss",
            "algorithm__kl__coef": 1e-6,
            "train__lr": 3e-3,
        },
    ),
    "parser looks for other words": (
        "no_answer_found",
        {"reward__pattern": "answer is (\\d)", **LITTLE},
    ),
    # of data
    "every prompt solved": (
        "always_right",
        {"reward__functions": ["any_digit"], "rollout__temperature": 0.3, **LITTLE},
    ),
    "most prompts solved": (
        "too_easy",
        {"reward__functions": ["any_digit"], "train__lr": 1e-5, **LITTLE},
    ),
    "most prompts too hard": ("few_contrasts", {"data__train": "hard.jsonl", **LITTLE}),
    "held-out data in the training data": (
        "seen_in_training",
        {**HELD_OUT, "data__eval": "tasks.jsonl", **LITTLE},
    ),
    "few held-out prompts": ("eval_too_small", {**HELD_OUT, "data__eval": "few.jsonl", **LITTLE}),
    "held-out answers unlike the trained ones": (
        "reward_hacking",
        {
            "data__train": "twos.jsonl",
            "data__eval": "no_twos.jsonl",
            "eval__every": 4,
            "train__lr": 5e-3,
        },
    ),
    "duplicates": ("repeated_data", {"data__train": "twice.jsonl", **LITTLE}),
    "long prompts left out": (
        "too_long_left_out",
        {
            "data__train": "long.jsonl",
            "data__max_prompt_tokens": 20,
            "data__too_long": "skip",
            **LITTLE,
        },
    ),
    "broken lines left out": (
        "bad_lines_left_out",
        {"data__train": "broken.jsonl", "data__skip_bad": True, **LITTLE},
    ),
    "one source only in effect": (
        "one_source_dominates",
        {"data__train": ["tasks.jsonl", "rare.jsonl"], **LITTLE},
    ),
    # of rollouts
    "answers cut off": ("truncated", {"rollout__max_new_tokens": 1, **LITTLE}),
    "engine gives other log-probabilities": (
        "sampler_disagrees",
        LITTLE,
        partial(engine_says, lambda place, p: p + (0.3 if place % 2 else -0.3)),
    ),
    "engine keeps its weights": (
        "stale_weights",
        {"train__lr": 5e-3, "train__steps": 12},
        engine_keeps_its_weights,
    ),
    "more requests than memory for them": (
        "preempted",
        {
            **RAMBLING,
            **LITTLE,
            "rollout__stop_token_ids": list(range(10, 15)),
            "system__kv_memory": "64KiB",
            "system__max_running": 96,
        },
    ),
    "rollouts that wait for the trainer": (
        "too_stale",
        {
            "system__engine_process": True,
            "rollout__max_staleness": 2,
            "rollout__prompts_per_step": 4,
            "train__steps": 30,
            "train__lr": 1e-4,
        },
        partial(slower_training, 0.3),
    ),
    "critic that does not learn": (
        "critic_explains_nothing",
        {
            "algorithm__name": "ppo",
            "critic__lr": 1e-12,
            "train__steps": 20,
            "rollout__prompts_per_step": 2,
        },
    ),
    "a critic that is thrown about": (
        "critic_useless",
        {
            "algorithm__name": "ppo",
            "critic__lr": 3.0,
            "train__steps": 20,
            "train__lr": 1e-4,
            "rollout__prompts_per_step": 2,
        },
    ),
    # of time
    "slow environment": (
        "slow_environment",
        {"environment__path": "rooms.py:Slow", "environment__isolation": "thread", **LITTLE},
        skipping,
    ),
    "engines without work": (
        "engines_idle",
        {"system__engine_process": True, **LITTLE},
        partial(skipping, TorchBackend, "forward_backward", 30),
    ),
    "slow reward": ("slow_reward", {"reward__functions": ["slow"], **LITTLE}, skipping),
    "slow sync": ("slow_sync", LITTLE, partial(skipping, SyncRollouts, "sync", 30)),
    "slow checkpoints": (
        "slow_checkpoints",
        {"checkpoint__every": 1, **LITTLE},
        partial(skipping, Checkpoints, "save", 30),
    ),
    "slow evaluation": (
        "slow_evaluation",
        {**HELD_OUT, "eval__every": 1, "eval__max_prompts": 240, **LITTLE},
        partial(skipping, tunesmith.run.loop.rl, "evaluate", 30),
    ),
    "a few long answers": (
        "stragglers",
        {**RAMBLING, **LITTLE},
        partial(skipping, SyncRollouts, "next", 30),
    ),
}


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ward]:
    made = make_ward(tmp_path_factory.mktemp("ward"))
    folder = made.folder
    few = tasks(60)
    choice = random.Random(0).choice
    data = {
        "twos": [task | {"answer": "2"} for task in few],
        "no_twos": [task | {"answer": "01"[n % 2]} for n, task in enumerate(tasks(100, 60))],
        "hard": [
            task | {"answer": task["answer"] if n % 20 == 0 else "7"} for n, task in enumerate(few)
        ],
        "few": tasks(8, 60),
        "twice": few + few,
        "long": [
            task | {"prompt": "long " * 8} if n % 4 == 0 else task for n, task in enumerate(few)
        ],
        "broken": [{"text": "no prompt"} if n % 4 == 3 else task for n, task in enumerate(few)],
        "rare": tasks(3, 200),
        "few_examples": examples(24),
        "twice_examples": examples(24) * 2,
        "broken_examples": [
            e | {"completion": "~^" * 9} if n // 8 == 14 else e for n, e in enumerate(examples(200))
        ],
        "random_examples": [e | {"completion": choice("0123456789")} for e in examples(40)],
        "random_held_out": [e | {"completion": choice("0123456789")} for e in examples(60, 100)],
    }
    for name, lines in data.items():
        write_lines(folder / f"{name}.jsonl", lines)
    yield made
    RELEASED.set()


def found(run: Path) -> dict[str, str]:
    return {finding.key: finding.severity for finding in diagnose(read_record(run))}


def placed(ward: Ward, settings: Settings) -> Settings:
    """Settings in which names of files are paths."""

    def path(value: Any) -> Any:
        if isinstance(value, list):
            return [path(item) for item in value]
        if value in ("BLANK", "POLICY"):
            return str(ward.blank if value == "BLANK" else ward.policy)
        named = isinstance(value, str) and (value.endswith(".jsonl") or ".py:" in value)
        return str(ward.folder / value) if named else value

    return {key: path(value) for key, value in settings.items()}


@pytest.mark.parametrize("name", HEALTHY_RL)
def test_a_healthy_run_of_rollouts(tmp_path: Path, ward: Ward, name: str) -> None:
    run = ward.rl(str(tmp_path / "run"), **placed(ward, HELD_OUT | HEALTHY_RL[name]))
    assert not {key: severity for key, severity in found(run).items() if severity != "note"}


@pytest.mark.parametrize("command", HEALTHY_DATA)
def test_a_healthy_run_on_given_answers(tmp_path: Path, ward: Ward, command: str) -> None:
    if command == "sft":
        run = ward.policy.parent.parent.parent
    else:
        settings = preference_settings(
            command, tmp_path, ward.policy, train__steps=20, eval__every=10
        )
        run = RUNS[command](None, settings).run_dir
    assert not {key: severity for key, severity in found(run).items() if severity != "note"}


@pytest.mark.parametrize("disease", RL)
def test_a_disease_of_rollouts_comes_first(tmp_path: Path, ward: Ward, disease: str) -> None:
    key, settings, *injected = RL[disease]
    with (injected[0] if injected else nullcontext)():
        run = ward.rl(str(tmp_path / "run"), **placed(ward, settings))
    assert next(iter(found(run)), None) == key, found(run)


def test_a_reward_that_keeps_memory(tmp_path: Path, ward: Ward) -> None:
    settings = {"reward__functions": ["leaks"], "rollout__prompts_per_step": 3, "train__steps": 12}
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn")
    ) as apart:  # its peak is that of this run alone
        run = apart.submit(ward.rl, str(tmp_path / "run"), **placed(ward, settings)).result()
    assert next(iter(found(run)), None) == "host_memory_grows", found(run)


def examples_with(ward: Ward, name: str, lines: list[dict[str, Any]]) -> Settings:
    return {"data__train": str(write_lines(ward.folder / f"{name}.jsonl", lines))}


def noisy_pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    """Pairs of which every second one is the wrong way round."""
    pairs: list[dict[str, str]] = lines_of("dpo", count, start)
    turned = [pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
    return [turned[n] if n // 4 % 2 else pair for n, pair in enumerate(pairs)]


def sft(**settings: Any) -> Callable[[Path, Ward], Path]:
    return lambda folder, ward: ward.sft(str(folder / "run"), **placed(ward, settings))


def noisy(folder: Path, ward: Ward) -> Path:
    write_lines(folder / "dpo.jsonl", noisy_pairs(48))
    write_lines(folder / "dpo_held_out.jsonl", noisy_pairs(240, 100))
    return RUNS["dpo"](
        None, preference_settings("dpo", folder, ward.policy, train__steps=24, eval__every=12)
    ).run_dir


def far(folder: Path, ward: Ward) -> Path:
    settings = {"train__steps": 30, "train__lr": 2e-2, "data__eval": None, "eval__every": None}
    return RUNS["dpo"](None, preference_settings("dpo", folder, ward.policy, **settings)).run_dir


GIVEN: dict[str, tuple[str, Callable[[Path, Ward], Path]]] = {
    "learning rate too high": ("lr_too_high", sft(train__lr=3.0, train__steps=12)),
    "learning rate too low": ("loss_flat", sft(train__lr=1e-6, train__steps=15)),
    "what the model knows": (
        "loss_does_not_fall",
        sft(
            model__path="POLICY",
            data__train="examples.jsonl",
            train__lr=1e-6,
            train__steps=24,
            train__batch_size=10,
        ),
    ),
    "many passes": ("many_epochs", sft(data__train="few_examples.jsonl", train__steps=20)),
    "duplicates": ("repeated_data", sft(data__train="twice_examples.jsonl")),
    "a broken batch": (
        "loss_spike",
        sft(
            model__path="POLICY",
            data__train="broken_examples.jsonl",
            data__shuffle=False,
            train__steps=20,
            train__lr=1e-3,
        ),
    ),
    "answers learned by heart": (
        "overfitting",
        sft(
            model__path="POLICY",
            data__train="random_examples.jsonl",
            data__eval="random_held_out.jsonl",
            eval__every=20,
            train__steps=80,
            train__lr=2e-2,
        ),
    ),
    "labels at random": ("no_preference", noisy),
    "far too many steps": ("chosen_unlikelier", far),
}


@pytest.mark.parametrize("disease", GIVEN)
def test_a_disease_of_given_answers_comes_first(tmp_path: Path, ward: Ward, disease: str) -> None:
    key, run = GIVEN[disease]
    findings = found(run(tmp_path, ward))
    assert next(iter(findings), None) == key, findings


def test_a_run_that_ended_early(tmp_path: Path, ward: Ward) -> None:
    ends = HELD_OUT | {"eval__every": 2, "eval__target": 0.05, "eval__at_start": False}
    assert "stopped_early" in found(ward.rl(str(tmp_path / "run"), **placed(ward, ends)))
