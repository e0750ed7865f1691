"""One run in every mode, with a slow reward and a long tail of lengths: ``python -m
benchmarks.modes --help``.

Each arm is the same ``tunesmith rl`` on model S (``workload.py``): an agent whose answers have
lognormal lengths, the same in every arm, and a slow reward. The arms differ only in settings of the
mode and run one after the other. The results file has the seconds of each step; the page's table
comes from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import write_between
from benchmarks.workload import WORKLOADS, build_model
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.records.metrics import read_metrics

RESULTS = Path(__file__).with_name("results") / "modes-cpu-2-core.json"
PAGE = Path(__file__).parent.parent / "docs" / "modes.md"
BEGIN = "<!-- results -->\n"
END = "<!-- end of results -->"
SETTLED = 8
"""Initial steps, which fill the queue and warm up and are left out."""
PROMPTS = 4
ANSWERS = 4
MEDIAN = 96
SIGMA = 1.2
SHORTEST = 8
LONGEST = 512
"""Tokens per answer, lognormal."""

AGENT = f"""\
import asyncio, math, random
from collections import Counter

asked = Counter()

async def answer(client, prompt):
    asked[prompt] += 1
    drawn = random.Random(f"{{asked[prompt]}} {{prompt}}").lognormvariate(math.log({MEDIAN}), {SIGMA})
    length = min({LONGEST}, max({SHORTEST}, round(drawn)))
    await client.chat.completions.create(messages=[{{"role": "user", "content": prompt}}], max_tokens=length)

async def judged(completions, **columns):
    await asyncio.sleep(SECONDS)
    return [float(len(text) % 2) for text in completions]
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

APART = {"system.engine_process": True}
PARTIAL = {"rollout.partial": True}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {},
    "synchronous, engine apart": APART,
    "over-generation, shared": {
        "rollout.max_staleness": 1,
        "rollout.over_generation": 1.5,
        **PARTIAL,
    },
    "one step behind, drained": {
        "rollout.max_staleness": 1,
        "rollout.over_generation": 2.0,
        **APART,
    },
    "one step behind, partial": {
        "rollout.max_staleness": 1,
        "rollout.over_generation": 2.0,
        **APART,
        **PARTIAL,
    },
    "four steps behind, drained": {
        "rollout.max_staleness": 4,
        "rollout.over_generation": 4.0,
        **APART,
    },
    "four steps behind, partial": {
        "rollout.max_staleness": 4,
        "rollout.over_generation": 4.0,
        **APART,
        **PARTIAL,
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description=__doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--steps", type=int, default=40, help=f"of a run, of which the first {SETTLED} are left out"
    )
    parser.add_argument("--reward-seconds", type=float, default=2.0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="other arms that are in it already stay"
    )
    parser.add_argument(
        "--page", action="store_true", help="only write docs/modes.md anew from --out"
    )
    given = parser.parse_args(arguments)
    if not given.page:
        workload = {"reward_seconds": given.reward_seconds, "steps": given.steps}
        there = json.loads(given.out.read_text()) if given.out.exists() else {}
        runs: dict[str, Any] = there["runs"] if there.get("workload") == workload else {}
        runs |= measure(given.arms, given.steps, given.reward_seconds)
        results = {
            "machine": {"cores": read_hardware().cores},
            "workload": workload,
            "runs": {arm: runs[arm] for arm in ARMS if arm in runs},
        }
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    text = table(json.loads(given.out.read_text()))
    if given.out == RESULTS:
        write_between(PAGE, BEGIN, END, "\n" + text)
    print(text)


def measure(arms: Sequence[str], steps: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Measurements of each step, by arm."""
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="modes-") as name:
        here = Path(name)
        build_model(here / "model")
        (here / "template.jinja").write_text(TEMPLATE)
        (here / "agent.py").write_text(AGENT.replace("SECONDS", str(seconds)))
        texts = WORKLOADS["A"].texts()
        (here / "tasks.jsonl").write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in texts * 8)
        )
        (here / "run.toml").touch()
        for number, arm in enumerate(arms):
            runs[arm] = [_facts(line) for line in _run(here, here / str(number), steps, ARMS[arm])]
            print(
                f"{arm}: {mean(step['seconds'] for step in runs[arm][SETTLED:]):.2f} s per step",
                flush=True,
            )
    return runs


def _run(here: Path, run_dir: Path, steps: int, changed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of each step. Engine and trainer have one core each if they work at the same
    time."""
    settings: dict[str, Any] = {
        "run_dir": str(run_dir), "model.path": str(here / "model"), "model.dtype": "bfloat16",
        "model.chat_template": str(here / "template.jinja"), "data.train": str(here / "tasks.jsonl"),
        "environment.path": f"{here}/agent.py:answer", "reward.functions": [f"{here}/agent.py:judged"],
        "rollout.prompts_per_step": PROMPTS, "rollout.group_size": ANSWERS, "rollout.max_new_tokens": LONGEST,
        "environment.max_turns": 1, "environment.max_tokens": LONGEST + 200, "train.steps": steps,
        "monitor.progress": False, "data.chat": True,
        **changed,
    }  # fmt: skip
    threads = (
        1 if settings.get("rollout.max_staleness") and settings.get("system.engine_process") else 2
    )
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "tunesmith", "rl", str(here / "run.toml"), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if "optimizer_steps" in line]


_KEPT = (
    "seconds",
    "idle/engine",
    "idle/trainer",
    "staleness/mean",
    "staleness/max",
    "seconds/sync",
)


def _facts(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: line[name] for name in _KEPT if name in line}


def table(results: Mapping[str, Any]) -> str:
    """Markdown: means over the steps of each arm, compared with the first arm's."""
    rows = [
        "| mode | seconds per step | steps per minute, against the first | engine idle | trainer idle | oldest token |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    first: float | None = None
    for arm, every in results["runs"].items():
        steps: list[dict[str, float]] = every[SETTLED:]
        seconds = mean(s["seconds"] for s in steps)
        first = first or seconds
        rows.append(
            f"| {arm} | {seconds:.2f} | {first / seconds:.2f}x "
            f"| {mean(s['idle/engine'] for s in steps):.0%} | {mean(s['idle/trainer'] for s in steps):.0%} "
            f"| {max(s['staleness/max'] for s in steps):.0f} steps |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
