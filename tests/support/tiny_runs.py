"""Small whole runs: data, a reward and settings in a directory, beside a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

REWARDS = """\
def share(completions, **columns):
    "How much of the answer lies in the first half of the alphabet's bytes."
    return [sum(c < "N" for c in text) / max(1, len(text)) for text in completions]


def needs(completions, solution, **columns):
    return [1.0 for _ in completions]


async def sometimes(completions, **columns):
    return [1.0 if len(text) and text[0] < "P" else 0.0 for text in completions]
"""

TIMES = (
    "time",
    "seconds",
    "tokens_per_second",
    "limit_share",
    "attainable_seconds",
    "idle",
    "engine_tokens_per_second",
    "scoring_seconds",
    "samples_per_second",
    "memory/",
    "machine/",
    "kv_",
    "waiting/",
)
"""Metrics that depend on the clock, or on what the process has cached before, by how their names
begin."""


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(start, start + count)]


def rl_settings(folder: Path, model: Path, run: str = "run", **changed: Any) -> list[str]:
    """Overrides of an RL run in ``folder``, whose data and reward file are made where missing.

    ``changed`` names keys with ``__`` for the dot.
    """
    if not (folder / "train.jsonl").exists():
        write_lines(folder / "train.jsonl", sums(12))
        (folder / "rewards.py").write_text(REWARDS)
    settings: dict[str, Any] = {
        "run_dir": str(folder / run),
        "model.path": str(model),
        "model.dtype": "float32",
        "data.train": str(folder / "train.jsonl"),
        "data.chat": False,
        "reward.functions": [f"{folder / 'rewards.py'}:share"],
        "reward.isolation": "thread",
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 8,
        "train.steps": 3,
        "train.lr": 1e-2,
        "system.threads": 1,
    }
    return _overrides(settings, changed)


def sft_settings(folder: Path, model: Path, run: str = "sft", **changed: Any) -> list[str]:
    if not (folder / "examples.jsonl").exists():
        lines = [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(24)]
        write_lines(folder / "examples.jsonl", lines)
    settings: dict[str, Any] = {
        "run_dir": str(folder / run),
        "model.path": str(model),
        "model.dtype": "float32",
        "data.train": str(folder / "examples.jsonl"),
        "data.chat": False,
        "train.batch_size": 8,
        "train.steps": 6,
        "train.lr": 1e-2,
        "system.threads": 1,
    }
    return _overrides(settings, changed)


def _overrides(settings: dict[str, Any], changed: dict[str, Any]) -> list[str]:
    for name, value in changed.items():
        settings[name.replace("__", ".")] = value
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]


def untimed(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without what depends on the clock."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor in a checkpoint, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.relative_to(checkpoint)}/{name}": t
        for file in files
        for name, t in load_file(file).items()
    }


def same_tensors(a: Path, b: Path) -> None:
    """Fail unless two checkpoints hold bitwise the same tensors."""
    ours = tensors(a)
    theirs = tensors(b)
    assert ours.keys() == theirs.keys() and ours
    different = [name for name, t in ours.items() if not t.equal(theirs[name])]
    assert not different, different
