"""One small arithmetic run for every mode: a model that adds or subtracts learns from its score
alone to add."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_runs import write_lines
from tunesmith.guide.recipes.arithmetic import make_model
from tunesmith.records.metrics import read_metrics
from tunesmith.records.toml import toml_value
from tunesmith.run import assembly
from tunesmith.run.assembly.session import RunResult

COMMON: dict[str, Any] = {
    "model.dtype": "float32", "data.chat": False, "system.threads": 1, "monitor.progress": False,
}  # fmt: skip
SFT: dict[str, Any] = {
    "train.batch_size": 64, "train.lr": 3e-3, "train.schedule": "cosine", "train.warmup_steps": 20,
}  # fmt: skip
RL: dict[str, Any] = {
    "reward.functions": ["exact_match"],
    "train.steps": 40,
    "train.lr": 5e-4,
    "rollout.prompts_per_step": 32,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 3,
    "monitor.samples": 0,
}
LARGEST = 18


def overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={toml_value(v)}" for key, v in settings.items()]


def taught(folder: Path, seed: int, head_dim: int = 16, steps: int = 600) -> Path:
    """A model that gives the sum of two numbers or, as often, their difference; its data beside it.

    vLLM on a CPU wants heads of at least 32.
    """
    pairs = [(a, b) for a in range(LARGEST) for b in range(a + 1)]
    draw = random.Random(seed)
    draw.shuffle(pairs)
    lines = [{"prompt": f"{a:02}+{b:02}=", "answer": f"{a + b:02}"} for a, b in pairs]
    wrong = [{**line, "answer": f"{a - b:02}"} for line, (a, b) in zip(lines, pairs, strict=True)]
    examples = [
        {"prompt": line["prompt"], "completion": line["answer"]} for line in (*lines, *wrong)
    ]
    write_lines(folder / "examples.jsonl", examples)
    write_lines(folder / "tasks.jsonl", lines)
    settings = {
        "run_dir": folder / "sft",
        "model.path": make_model(folder / "model", seed, 64, 2, head_dim=head_dim),
        "data.train": folder / "examples.jsonl",
        "train.seed": seed,
        "train.steps": steps,
    }
    return assembly.run_sft(None, overrides(COMMON | SFT | settings)).checkpoint


def taught_once(factory: pytest.TempPathFactory, seed: int) -> tuple[Path, Path]:
    """The folder and the model of ``taught``, which the workers of a session make once."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"taught-{seed}"
    folder.mkdir(exist_ok=True)
    made = folder / "checkpoint.txt"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(str(taught(folder, seed)))
    return folder, Path(made.read_text())


def learned(folder: Path, model: Path, run: str, seed: int, changed: dict[str, Any]) -> RunResult:
    """Reinforcement learning from ``model`` on the data in ``folder``."""
    tasks = folder / "tasks.jsonl"
    settings = {
        "run_dir": folder / run,
        "model.path": model,
        "data.train": tasks,
        "data.eval": tasks,
        "train.seed": seed,
    }
    return assembly.run_rl(None, overrides(COMMON | RL | settings | changed))


def check_learned_as(
    local: RunResult, outcome: RunResult, *, staleness: int, same_start: bool
) -> None:
    """Both learned to add, and one no better than the other.

    Args:
        local: of the engine in the trainer's process.
        same_start: whether ``outcome`` drew the same tokens in its first step.
    """
    before, after = (outcome.evaluations[place]["eval/reward"] for place in (0, -1))
    assert after > before + 0.15
    assert abs(after - local.evaluations[-1]["eval/reward"]) < 0.15
    theirs, ours = (
        [line for line in read_metrics(o.run_dir / "metrics.jsonl") if "grad_norm" in line]
        for o in (local, outcome)
    )
    assert len(ours) == 40
    assert max(line["staleness/max"] for line in ours) <= staleness
    if same_start:
        for name in ("grad_norm", "loss", "reward"):
            assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-4, abs=1e-6), name
