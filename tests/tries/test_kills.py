"""Runs are killed, or get signals, at random moments and are continued: they end as if nothing had
happened."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import (
    rl_settings,
    same_tensors,
    sft_settings,
    sums,
    untimed,
    write_lines,
)
from tunesmith.run.loop.checkpoint import read_state

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "60"))
STEPS = 12
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

KINDS: dict[str, dict[str, Any]] = {
    "sft": {"checkpoint__every": 3},
    "rl": {
        "checkpoint__every": 3,
        "train__passes_per_batch": 2,
        "train__batch_size": 8,
        "algorithm__kl__coef": 0.01,
    },
    "ppo": {
        "checkpoint__every": 4,
        "algorithm__name": "ppo",
        "train__ema_decay": 0.9,
        "eval__use_ema": True,
    },
    "lora": {"checkpoint__minutes": 0.01, "lora__rank": 2, "lora__dropout": 0.1},
    "processes": {"checkpoint__every": 3, "system__engine_process": True, "system__engines": 2},
}
UNREPEATABLE = ("processes",)
"""Which engine answers depends on the clock there."""


class Case:
    """A kind of run, its settings, and how it ends and how long it takes when nothing disturbs
    it."""

    def __init__(self, folder: Path, model: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.command = "sft" if kind in ("sft", "lora") else "rl"
        self.make = sft_settings if self.command == "sft" else rl_settings
        self.model = model
        self.make(folder, model)
        lines = sums(4, 40)
        if self.command == "sft":
            lines = [{"prompt": s["prompt"], "completion": s["answer"]} for s in lines]
        self.held_out = write_lines(folder / "held_out.jsonl", lines)
        (folder / "run.toml").touch()
        begun = time.monotonic()
        code = wait(self.start("straight"))
        assert code == 0, self.said("straight")
        self.seconds = time.monotonic() - begun

    def start(self, run: str) -> int:
        """The process number of ``tunesmith`` in a copy of this process, which has everything
        imported."""
        options = {
            "data__eval": str(self.held_out),
            "eval__every": 2,
            "train__steps": STEPS,
            **KINDS[self.kind],
        }
        said = self.make(self.folder, self.model, run, **options, checkpoint__resume="auto")
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            log = os.open(self.folder / f"{run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")
            sys.argv = ["tunesmith", self.command, str(self.folder / "run.toml"), *said]
            from tunesmith.cli.main import app

            app()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 99
        os._exit(code)

    def said(self, run: str) -> str:
        return (self.folder / f"{run}.log").read_text(errors="replace")


def wait(process: int, seconds: float = 120.0) -> int:
    """The exit code; negative for a signal."""
    deadline = time.monotonic() + seconds
    while (found := os.waitpid(process, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return 124
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    import torch

    torch.set_num_threads(1)
    model = save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    return [Case(tmp_path_factory.mktemp(kind), model, kind) for kind in KINDS]


def left_in_memory() -> set[str]:
    memory = Path("/dev/shm")
    return {p.name for p in memory.glob("tunesmith-*")} if memory.is_dir() else set()


def rollouts_of(run: Path) -> bytes:
    """What it sampled; a supervised run has no such file."""
    written = run / "rollouts.jsonl"
    return written.read_bytes() if written.exists() else b""


def faults(case: Case, run: str) -> list[str]:
    """What differs from the run that nothing disturbed."""
    straight = case.folder / "straight"
    ours = case.folder / run
    last = f"checkpoints/step-{STEPS:06d}"
    found: list[str] = []
    if "Traceback" in case.said(run):
        found.append("a traceback: " + case.said(run)[-2000:])
    lines = untimed(ours / "metrics.jsonl")
    if case.kind in UNREPEATABLE:
        steps = [line["step"] for line in lines if "loss" in line]
        return found + ([f"steps {steps}"] if steps != list(range(1, STEPS + 1)) else [])
    try:
        same_tensors(straight / last, ours / last)
    except AssertionError as error:
        found.append(f"other weights: {str(error)[:200]}")
    if read_state(straight / last) != read_state(ours / last):
        found.append("another state")
    if untimed(straight / "metrics.jsonl") != lines:
        found.append("other metrics")
    if rollouts_of(straight) != rollouts_of(ours):
        found.append("other rollouts")
    return found


@pytest.mark.timeout(3000)
def test_a_run_that_is_killed_and_continued_is_the_run_it_was(cases: list[Case]) -> None:
    rng = random.Random(SEED)
    before = left_in_memory()
    tried: Counter[str] = Counter()
    wrong: list[str] = []
    run = 0
    while tried.total() < COUNT:
        case = cases[run % len(cases)]
        name = f"disturbed-{run}"
        run += 1
        for _ in range(rng.choice([1, 1, 2, 3])):
            process = case.start(name)
            number = rng.choice(SIGNALS)
            time.sleep(rng.uniform(0.02, 1.05) * case.seconds)
            begun = time.monotonic()
            (os.killpg if rng.random() < 0.5 else os.kill)(process, number)
            code = wait(process)
            took = time.monotonic() - begun
            tried[signal.Signals(number).name] += 1
            told = f"{case.kind} {name} {signal.Signals(number).name}"
            if code not in (0, -number, 128 + number):
                wrong.append(f"{told}: exit code {code}: {case.said(name)[-1500:]}")
            if took > 15:
                wrong.append(f"{told}: ended after {took:.1f} s")
        code = wait(case.start(name))
        if code != 0:
            wrong.append(
                f"{case.kind} {name}: continued, exit code {code}: {case.said(name)[-1500:]}"
            )
            continue
        wrong += [f"{case.kind} {name}: {fault}" for fault in faults(case, name)]
    deadline = time.monotonic() + 15
    while (left := left_in_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        wrong.append(f"left in memory: {sorted(left)}")
    print(f"\nkills and signals: {tried.total()} tried, {dict(tried)}, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
