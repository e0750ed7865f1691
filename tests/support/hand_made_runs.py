"""Directories of runs, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_runs import write_lines
from tunesmith.records.facts import RunFacts, write_facts

HOSTILE = (
    "<script>window.hacked = 1</script></script><img src=x onerror=alert(1)>\x1b[31m "
    "\u202e & \ud800 é"
)


def rollout(
    step: int, group: int = 0, reward: float | None = 1.0, kind: str = "train", **fields: Any
) -> dict[str, Any]:
    """A line as the log writes it."""
    line = {
        "step": step,
        "kind": kind,
        "group": group,
        "task": f"t.jsonl:{group}",
        "reward": reward,
        "rewards": {},
    }
    line |= {
        "advantage": None,
        "status": "ok",
        "error": None,
        "tokens": 2,
        "finish_reason": "stop",
        "versions": [0, 0],
    }
    return (
        line
        | {"prompt": "1+1=", "columns": {"answer": "2"}, "completion": f"{step}.{group}"}
        | fields
    )


def make_run(folder: Path, steps: int = 5, lines: list[dict[str, Any]] | None = None) -> Path:
    """A run's directory, written by hand."""
    folder.mkdir()
    metrics: list[dict[str, Any]] = [
        {"step": 0, "time": 100.0, "eval/accuracy": 0.25, "eval/reward": 0.2}
    ]
    for step in range(1, steps + 1):
        phases = {"seconds/rollout": 2.0, "seconds/train": 1.0, "idle/trainer": 0.5, "kv_peak": 6.0}
        metrics.append(
            {
                "step": step,
                "time": 100.0 + 3 * step,
                "reward": step / 10,
                "loss": None,
                "seconds": 3.0,
                **phases,
            }
        )
    write_lines(
        folder / "metrics.jsonl", [*metrics, {"step": steps, "time": 200.0, "eval/accuracy": 0.5}]
    )
    kept = {
        "train.steps": {"value": steps, "source": "said"},
        "train.lr": {"value": 1e-6, "source": "derived", "reason": "why"},
    }
    (folder / "resolved.json").write_text(json.dumps({"settings": kept, "notes": ["a note"]}))
    device = {
        "device": "trainer",
        "roles": {"policy": {"weights": 20}, "engine": {"kv": 8}},
        "phases": {"training": 30},
    }
    plan = {
        "memory": [{**device, "host": 0, "peak": 30, "free": 100, "share": 0.3}],
        "seconds": {"step": 2.5},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    write_facts(RunFacts(rollouts=True, eval_size=100), folder)
    write_lines(
        folder / "rollouts.jsonl",
        [rollout(s, g, r) for s in (1, 2) for g in (0, 1) for r in (0.0, 1.0)]
        if lines is None
        else lines,
    )
    return folder
