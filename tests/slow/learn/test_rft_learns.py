"""Rejection sampling raises accuracy, on two seeds; batch inference survives being killed."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.documents import ROOT
from tests.support.forks import popen
from tests.support.long import again
from tests.support.tiny_runs import REWARDS, sums, write_lines
from tunesmith.records.runs import progress_of
from tunesmith.run.assembly.train import run_sft
from tunesmith.run.offline.rft import run_rft


@pytest.mark.parametrize("seed", [1, again(2)])
def test_accuracy_rises(tmp_path: Path, seed: int) -> None:
    """The unit conversion example: a model that rounds half of its answers learns from those that
    it does not."""
    here = tmp_path / "unit_conversion"
    example = ROOT / "examples" / "unit_conversion"
    shutil.copytree(example, here, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl"))
    runpy.run_path(str(here / "prepare.py"))["main"]()
    said = [f"train.seed={seed}", "system.threads=1", "monitor.progress=false"]
    start = run_sft(here / "sft.toml", [f"run_dir={here / 'sft'}", *said]).checkpoint
    more = [f"run_dir={here / 'rft'}", f"model.path={start}", f"sampling.seed={seed}", *said]
    done = run_rft("run", here / "rft.toml", more)
    before, after = (done.evaluations[name]["accuracy"] for name in ("base", "round-1"))
    assert before[0] < 0.8 and after[0] > 0.9 and after[0] - before[0] > 0.15, done.evaluations
    assert before[2] < after[1], "the intervals do not touch"
    assert done.yields["round-1"]["solved"] > 0.6 * done.yields["round-1"]["questions"]


def test_killed_again_and_again_it_writes_what_it_would_have_written_at_once(
    tmp_path: Path,
) -> None:
    tiny.save_model(tmp_path / "model")
    write_lines(tmp_path / "in.jsonl", sums(400))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "model"\ndtype = "float32"\n[data]\ntrain = "in.jsonl"\nchat = false\n'
        "[sampling]\nn = 2\nmax_new_tokens = 60\n[system]\nthreads = 1\nmax_running = 16\n"
    )
    rng = random.Random()

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tunesmith", "generate", "run.toml", f"run_dir={name}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def finish(process: subprocess.Popen[bytes]) -> None:
        _, told = process.communicate(timeout=600)
        assert process.returncode == 0, told.decode()

    finish(start("straight"))
    out = tmp_path / "killed" / "completions.jsonl"
    for _ in range(2):
        process = start("killed")
        size = out.stat().st_size if out.exists() else 0
        deadline = time.monotonic() + 600
        while not out.exists() or out.stat().st_size <= size:
            assert process.poll() in (None, 0) and time.monotonic() < deadline
            if process.poll() == 0:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start("killed"))
    straight = (tmp_path / "straight" / "completions.jsonl").read_bytes()
    assert out.read_bytes() == straight
    assert [json.loads(line)["answer"] for line in straight.splitlines()] == [
        s["answer"] for s in sums(400)
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_what_is_finished_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    tiny.save_model(tmp_path / "model")
    write_lines(tmp_path / "in.jsonl", sums(60))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "model"\ndtype = "float32"\n[data]\ntrain = "in.jsonl"\n'
        'eval = "in.jsonl"\nchat = false\n'
        '[reward]\nfunctions = ["rewards.py:share"]\nisolation = "thread"\n[rft]\n'
        "threshold = 0.05\n"
        "[sampling]\nn = 4\nmax_new_tokens = 200\n[system]\nthreads = 1\nmax_running = 16\n"
    )

    def start(name: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tunesmith",
            "rft",
            "generate",
            "run.toml",
            f"run_dir={name}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )

    assert start("straight").wait(600) == 0
    process = start("cut")
    folder = tmp_path / "cut" / "round-1"
    files = [folder / "samples.jsonl", folder / ".samples.unfinished.jsonl"]
    while not any(file.exists() and file.stat().st_size for file in files):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    _, told = process.communicate(timeout=600)
    seen = progress_of(tmp_path / "cut", {}, 0)
    assert seen.state == "stopped" and seen.total == 180 and seen.command == "rft"
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 128 + number, told
        assert (
            "of 60 lines" in told
            and told.count("Continue with: tunesmith rft generate run.toml") == 1
        )
    assert start("cut").wait(600) == 0
    name = "round-1/samples.jsonl"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert progress_of(tmp_path / "cut", {}, 0).state == "done" and not files[1].exists()


@pytest.mark.long
def test_the_ablation_runs(tmp_path: Path) -> None:
    """Three arms of the benchmark on a short warm-up, by its command: both trainers learn the same
    answers."""
    names = ["padded", "padded, no gradient checkpointing", "tunesmith"]
    command = [
        sys.executable, "-m", "benchmarks.rft", "--arms", *names, "--questions", "400",
        "--warm-up-steps", "300", "--out", str(tmp_path / "rft.json"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rft.json").read_text())
    assert list(found["arms"]) == names and not any(
        "failed" in arm for arm in found["arms"].values()
    )
    before = found["before"]["accuracy"][0]
    assert all(arm["evaluation"]["accuracy"][0] > before for arm in found["arms"].values()), found
    assert "| tunesmith |" in (tmp_path / "rft.md").read_text()
