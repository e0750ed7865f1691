"""Small whole runs on judged data, in a directory beside a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_runs import write_lines
from tunesmith.run import assembly

RUNS: dict[str, Callable[[Path | None, Sequence[str]], assembly.RunResult]] = {
    "rm": assembly.run_rm,
    "dpo": assembly.run_dpo,
    "kto": assembly.run_kto,
    "prm": assembly.run_prm,
}


def lines_of(command: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """What is good ends in a low digit, what is bad in a high one."""
    found: list[dict[str, Any]] = []
    for i in range(start, start + count):
        low = f"{i % 7}{i % 4}"
        high = f"{i % 7}{i % 4 + 5}"
        if command == "kto":
            found.append(
                {"prompt": f"{i}:", "completion": low if i % 2 else high, "label": bool(i % 2)}
            )
        elif command == "prm":
            labels = [i % 2 == 0, i % 3 == 0]
            steps = [low if good else high for good in labels]
            found.append({"prompt": f"{i}:", "completions": steps, "labels": labels})
        else:
            found.append({"prompt": f"{i}:", "chosen": low, "rejected": high})
    return found


def preference_settings(
    command: str, folder: Path, model: Path, run: str = "run", **changed: Any
) -> list[str]:
    data = folder / f"{command}.jsonl"
    held_out = folder / f"{command}_held_out.jsonl"
    if not data.exists():
        write_lines(data, lines_of(command, 48))
        write_lines(held_out, lines_of(command, 16, 100))
    settings: dict[str, Any] = {
        "run_dir": str(folder / run),
        "model.path": str(model),
        "model.dtype": "float32",
        "data.train": str(data),
        "data.eval": str(held_out),
        "data.chat": False,
        "train.batch_size": 8,
        "train.steps": 4,
        "train.lr": 2e-3,
        "eval.every": 2,
        "checkpoint.every": 2,
        "system.threads": 1,
    }
    for name, value in changed.items():
        settings[name.replace("__", ".")] = value
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]
