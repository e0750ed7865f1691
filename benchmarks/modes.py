"""One run in every mode, with a slow reward and a long tail of lengths: ``python -m benchmarks.modes --help``.

Each arm is the same ``tunesmith rl`` on model S (``workload.py``): an agent whose answers have lognormal lengths,
and a reward that takes a while. The arms differ in settings of the mode only and run one after the other, in
rounds. The results file has the seconds of each step; the page's table comes from it.
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
from statistics import mean, median
from typing import Any

from benchmarks.workload import WORKLOADS, build_model
from tunesmith.monitor.metrics import read_metrics
from tunesmith.plan.hardware import read_hardware

RESULTS = Path(__file__).with_name("results") / "modes-cpu-2-core.json"
PAGE = Path(__file__).parent.parent / "docs" / "modes.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
SETTLED = 3
"""Steps at the start that fill the queue and warm up, and are left out."""

AGENT = """\
import asyncio, math, random

async def answer(client, prompt):
    length = min(512, max(8, round(math.exp(random.gauss(math.log({median}), 1.0)))))
    await client.chat.completions.create(messages=[{{"role": "user", "content": prompt}}], max_tokens=length)

async def judged(completions, **columns):
    await asyncio.sleep({seconds})
    return [float(len(text) % 2) for text in completions]
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

APART = {"system.engine_process": True}
PARTIAL = {"rollout.partial": True}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {},
    "synchronous, engine apart": APART,
    "over-generation, shared": {"rollout.max_staleness": 1, "rollout.over_generation": 1.5, **PARTIAL},
    "one step behind, drained": {"rollout.max_staleness": 1, "rollout.over_generation": 2.0, **APART},
    "one step behind, partial": {"rollout.max_staleness": 1, "rollout.over_generation": 2.0, **APART, **PARTIAL},
    "two steps behind, drained": {"rollout.max_staleness": 2, "rollout.over_generation": 2.0, **APART},
    "two steps behind, partial": {"rollout.max_staleness": 2, "rollout.over_generation": 2.0, **APART, **PARTIAL},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description=__doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help=f"of a run, of which the first {SETTLED} are left out")
    parser.add_argument("--reward-seconds", type=float, default=2.0)
    parser.add_argument("--median", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write docs/modes.md anew from --out")
    given = parser.parse_args(arguments)
    if not given.page:
        runs = measure(given.arms, given.rounds, given.steps, given.reward_seconds, given.median)
        machine = {"cores": read_hardware().cores}
        workload = {"reward_seconds": given.reward_seconds, "median": given.median, "steps": given.steps}
        given.out.write_text(json.dumps({"machine": machine, "workload": workload, "runs": runs}, indent=1) + "\n")
    text = table(json.loads(given.out.read_text()))
    if given.out == RESULTS:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])
    print(text)


def measure(arms: Sequence[str], rounds: int, steps: int, seconds: float, length: int) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="modes-") as name:
        here = Path(name)
        build_model(here / "model")
        (here / "template.jinja").write_text(TEMPLATE)
        (here / "agent.py").write_text(AGENT.format(median=length, seconds=seconds))
        texts = WORKLOADS["A"].texts()
        (here / "tasks.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts * 8))
        (here / "run.toml").touch()
        for number in range(rounds):
            for arm in arms:
                lines = _run(here, here / f"{number}-{arms.index(arm)}", steps, ARMS[arm])
                runs.append({"arm": arm, "round": number, "steps": [_facts(line) for line in lines]})
                print(f"{arm}: {median(step['seconds'] for step in runs[-1]['steps'][SETTLED:]):.2f} s per step")
    return runs


def _run(here: Path, run_dir: Path, steps: int, changed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of each step. Engine and trainer have a core each where both work at once."""
    settings: dict[str, Any] = {
        "run_dir": str(run_dir), "model.path": str(here / "model"), "model.dtype": "bfloat16",
        "model.chat_template": str(here / "template.jinja"), "data.train": str(here / "tasks.jsonl"),
        "environment.path": f"{here}/agent.py:answer", "reward.functions": [f"{here}/agent.py:judged"],
        "rollout.prompts_per_step": 8, "rollout.group_size": 8, "rollout.max_new_tokens": 512,
        "environment.max_turns": 1, "environment.max_tokens": 700, "train.steps": steps, "monitor.progress": False,
        "data.chat": True,
        **changed,
    }  # fmt: skip
    threads = 1 if settings.get("rollout.max_staleness") and settings.get("system.engine_process") else 2
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "tunesmith", "rl", str(here / "run.toml"), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if "optimizer_steps" in line]


_KEPT = ("seconds", "idle/engine", "idle/trainer", "staleness/mean", "staleness/max", "tokens", "seconds/sync")


def _facts(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: line[name] for name in _KEPT if name in line}


def table(results: Mapping[str, Any]) -> str:
    """Markdown: per arm the median step over all rounds, and what it was of the first arm's in the same round."""
    by_arm: dict[str, dict[int, list[dict[str, float]]]] = {}
    for run in results["runs"]:
        by_arm.setdefault(run["arm"], {})[run["round"]] = run["steps"][SETTLED:]
    first = next(iter(by_arm.values()))
    rows = [
        "| mode | seconds per step | steps per minute, against the first | engine idle | trainer idle | oldest token |"
    ]
    rows.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for arm, rounds in by_arm.items():
        steps = [step for one in rounds.values() for step in one]
        ratios = [mean(s["seconds"] for s in first[n]) / mean(s["seconds"] for s in rounds[n]) for n in rounds]
        rows.append(
            f"| {arm} | {mean(s['seconds'] for s in steps):.2f} | {median(ratios):.2f}x "
            f"| {mean(s['idle/engine'] for s in steps):.0%} | {mean(s['idle/trainer'] for s in steps):.0%} "
            f"| {max(s['staleness/max'] for s in steps):.0f} steps |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
