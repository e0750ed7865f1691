"""Sinks that a run has filled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.tiny_runs import sums, write_lines
from tunesmith.config.load import load_config
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.records.run_dir import RunDir
from tunesmith.run.assembly.sinks import open_sinks


def configured(sink: str, run_dir: Path) -> RunConfig:
    write_lines(run_dir.parent / "lines.jsonl", sums(2))
    said = [
        "model.path=org/model",
        f"data.train={run_dir.parent / 'lines.jsonl'}",
        'reward.functions=["exact_match"]',
        f"run_dir={run_dir}",
        "train.lr=0.25",
        "train.steps=3",
        f'monitor.sinks=["{sink}"]',
        "monitor.run_name=trial",
        'monitor.tags=["a","b"]',
        "monitor.project=sums",
    ]
    return load_config(RLConfig, None, said)


ROWS = [{"prompt": "1+1=", "completion": "<b>3\x1b[31m", "reward": 0.5, "rewards": {"exact": 0.0}}]


def fill(sink: str, place: Path, resume: int | None, values: Sequence[float]) -> None:
    run_dir = place / "run"
    run_dir.mkdir(exist_ok=True)
    said = list[str]()
    config = configured(sink, run_dir)
    [opened] = open_sinks(
        config.monitor, settings(config), RunDir(run_dir), place, resume, said.append
    )
    for step, value in enumerate(values, (resume or 0) + 1):
        opened.write(
            step,
            {"reward": value, "reward/std": value / 2, "eval/pass@4": 1.0, "loss": float("nan")},
        )
        opened.show(step, ROWS)
    opened.close(failed=False)
    assert not said
