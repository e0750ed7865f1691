"""Runs of several ranks beside those of one."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.tiny_runs import write_lines
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly


def sft_settings(folder: Path, model: Path, run: str, **changed: Any) -> list[str]:
    data = write_lines(
        folder / "sft.jsonl", ({"prompt": f"{i}:", "completion": f"{2 * i}"} for i in range(24))
    )
    said = {
        "run_dir": folder / run,
        "model.path": model,
        "model.dtype": "float32",
        "data.train": data,
        "data.eval": data,
        "data.chat": False,
        "train.steps": 3,
        "train.lr": 1e-3,
        "train.batch_size": 7,
        "eval.every": 3,
        "system.device": "cpu",
        "system.max_tokens_per_microbatch": 40,
        "monitor.progress": False,
        **changed,
    }
    return [
        f"{key.replace('__', '.')}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in said.items()
    ]


def same(one: assembly.RunResult, other: assembly.RunResult) -> None:
    """Losses and gradients to 1e-5. AdamW may move a weight with a gradient near 0 by more."""
    lines = [read_metrics(result.run_dir / "metrics.jsonl") for result in (one, other)]
    names = ("loss", "grad_norm", "eval/loss", "reward", "tokens", "critic/loss")
    seen = [
        [[line.get(name, -1.0) for name in ("step", *names)] for line in found] for found in lines
    ]
    assert len(seen[0]) == len(seen[1]) >= 3
    for ours, theirs in zip(*seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    configs = [
        json.loads((result.checkpoint / "config.json").read_text())
        for result in (one, other)
        if (result.checkpoint / "config.json").exists()
    ]
    assert all(found == configs[0] for found in configs)
    files = [path.name for path in one.checkpoint.glob("*model*.safetensors")]
    assert files
    for file in files:
        ours, theirs = (load_file(result.checkpoint / file) for result in (one, other))
        for name, tensor in ours.items():
            assert float((theirs[name] - tensor).abs().mean()) < 1e-5, name


def last_step(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return (
        max((line["step"] for line in read_metrics(metrics)), default=0) if metrics.exists() else 0
    )


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while last_step(run_dir) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
