"""Examples as a person runs them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support import forks

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}


def python(folder: Path, *arguments: str) -> str:
    ended = forks.run([sys.executable, *arguments], cwd=folder, timeout=600, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def tunesmith(folder: Path, *arguments: str) -> str:
    return python(folder, "-c", "from tunesmith.cli.main import main; main()", *arguments)


def metrics(run_dir: Path, name: str) -> list[float]:
    """The values of a metric, first to last."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
