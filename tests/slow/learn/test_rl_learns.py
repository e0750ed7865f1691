"""PPO, with a critic of its own and on the policy's trunk, and GSPO get better at a task by its
score alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.long import again
from tests.support.tiny_runs import write_lines
from tunesmith.guide.recipes.arithmetic import make_model
from tunesmith.records.toml import toml_value
from tunesmith.run import assembly

LETTERS = "abcdefgh"
REWARD = """\
def right(completions, answer, **columns):
    "Share of the letters that stand where they should."
    return [sum(x == y for x, y in zip(text, gold)) / len(gold) for text, gold in zip(completions, answer)]
"""
COMMON: dict[str, Any] = {
    "model.dtype": "float32", "data.chat": False, "system.threads": 1, "monitor.progress": False,
}  # fmt: skip
SFT: dict[str, Any] = {
    "train.steps": 150,
    "train.batch_size": 32,
    "train.lr": 2e-3,
    "train.warmup_steps": 5,
}
RL: dict[str, Any] = {
    "train.steps": 120, "train.lr": 3e-4, "rollout.prompts_per_step": 16, "rollout.group_size": 4,
    "rollout.max_new_tokens": 4, "train.batch_size": 32, "monitor.samples": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.name": "ppo", "critic.lr": 1e-3, "critic.freeze_actor_steps": 3},
    "ppo, shared trunk": {"algorithm.name": "ppo", "critic.shared_trunk": True, "critic.lr": 3e-3},
    "gspo": {"algorithm.name": "gspo"},
}


SEEDS = {"ppo": (0, 1), "ppo, shared trunk": (1, 2), "gspo": (0, 2)}
FASTER: dict[str, dict[str, Any]] = {
    "ppo": {"train.steps": 48, "train.lr": 4.5e-4},
    "ppo, shared trunk": {"train.steps": 100, "train.lr": 4.5e-4},
    "gspo": {"train.steps": 48, "train.lr": 4.5e-4},
}
"""What is enough from the first of the seeds."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Of a seed: a model that copies words more often than it writes them backwards, which is what
    is rewarded."""
    return cache(lambda seed: taught(tmp_path_factory.mktemp("start"), seed))


def taught(folder: Path, seed: int) -> Path:
    words = ["".join(w) for w in itertools.product(LETTERS, repeat=3)]
    rng = random.Random(seed)
    rng.shuffle(words)
    lines = [
        {"prompt": f"{w}=", "answer": w[::-1], "completion": w[:: rng.choice((-1, -1, 1, 1, 1))]}
        for w in words
    ]
    write_lines(folder / "held_out.jsonl", lines[:64])
    write_lines(folder / "train.jsonl", lines[64:])
    (folder / "rewards.py").write_text(REWARD)
    model = make_model(folder / "model", seed, hidden=64, layers=2, alphabet=LETTERS + "=")
    settings = {
        "run_dir": folder / "sft",
        "model.path": model,
        "data.train": folder / "train.jsonl",
        "train.seed": seed,
    }
    return assembly.run_sft(None, overrides(COMMON | SFT | settings)).checkpoint


def overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={toml_value(v)}" for key, v in settings.items()]


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        param
        for kind, (first, other) in SEEDS.items()
        for param in ((kind, first), again(kind, other))
    ],
)
def test_the_held_out_reward_rises(
    start: Callable[[int], Path], kind: str, seed: int, tmp_path: Path
) -> None:
    model = start(seed)
    folder = model.parents[3]
    settings = {
        "run_dir": tmp_path / "rl",
        "model.path": model,
        "data.train": folder / "train.jsonl",
        "train.seed": seed,
        "data.eval": folder / "held_out.jsonl",
        "reward.functions": [f"{folder / 'rewards.py'}:right"],
    }
    faster = FASTER[kind] if seed == SEEDS[kind][0] else {}
    outcome = assembly.run_rl(None, overrides(COMMON | RL | KINDS[kind] | faster | settings))
    before, after = (outcome.evaluations[place]["eval/reward"] for place in (0, -1))
    assert before < 0.7 and after > 0.85
