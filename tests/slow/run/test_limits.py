"""Real shortage: of memory, under a limit of the address space, and of disk, on a tiny file
system."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support import forks
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings, write_lines
from tunesmith.records.metrics import read_metrics
from tunesmith.run.loop.checkpoint import Checkpoints, read_state

LIMITED = """\
import resource, sys
from pathlib import Path
import torch
from tunesmith.run import assembly
from tunesmith.run.loop import supervised

room = int(sys.argv.pop(1))
run = supervised.run

def with_little_room(parts, session):
    # Everything is loaded by now: what is left is for the step.
    lines = Path("/proc/self/statm").read_text().split()
    if room:
        limit = int(lines[0]) * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    run(parts, session)

supervised.run = with_little_room
assembly.run_sft(None, sys.argv[1:])
"""
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def limited(folder: Path, settings: list[str], room: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(room), *settings]
    return forks.run(command, cwd=folder, timeout=600, env=ENVIRONMENT)


def test_a_run_whose_micro_batches_do_not_fit_finishes_with_the_same_losses(tmp_path: Path) -> None:
    """Large micro-batches take over 500 MB of activations; 300 MB are left."""
    model = save_model(
        tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=4
    )
    data = write_lines(tmp_path / "data.jsonl", [{"text": f"{i:03d}" * 80} for i in range(32)])

    def settings(run: str) -> list[str]:
        return sft_settings(
            tmp_path,
            model,
            run,
            data__train=str(data),
            data__eval=str(data),
            train__steps=2,
            train__lr=1e-3,
            train__batch_size=32,
            system__max_tokens_per_microbatch=8192,
        )

    free = limited(tmp_path, settings("free"), 0)
    assert free.returncode == 0, free.stderr
    tight = limited(tmp_path, settings("tight"), 300 * 10**6)
    assert tight.returncode == 0, tight.stderr[-3000:]
    lowered = re.findall(r"max_tokens_per_microbatch lowered from (\d+) to (\d+)", tight.stdout)
    assert lowered and lowered[0][0] == "8192" and "lowered" not in free.stdout
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in line]
        for run in ("free", "tight")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert read_state(tmp_path / "tight/checkpoints/step-000002")["max_tokens"] == int(
        lowered[-1][1]
    )


def test_one_sequence_that_does_not_fit_ends_with_advice(tmp_path: Path) -> None:
    model = save_model(
        tmp_path / "model",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        max_position_embeddings=8192,
    )
    data = write_lines(tmp_path / "data.jsonl", [{"text": "abcd" * 1500}])
    settings = sft_settings(
        tmp_path, model, data__train=str(data), train__batch_size=1, train__steps=1
    )
    ended = limited(tmp_path, settings, 150 * 10**6)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "DeviceMemoryError" in last and "gradient_checkpointing" in last, ended.stderr[-2000:]


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


def rl(folder: Path, settings: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "none.toml").touch()
    code = f"{before}\nfrom tunesmith.cli.main import main\nmain()\n"
    command = [sys.executable, "-c", code, "rl", str(folder / "none.toml"), *settings]
    return forks.run(command, cwd=folder, timeout=600, env=ENVIRONMENT)


def ends_whole(ended: subprocess.CompletedProcess[str], run: Path, model: Path, steps: int) -> None:
    """Exit code 2, the last good checkpoint named, and that one is good."""
    assert ended.returncode == 2, (ended.returncode, ended.stderr[-3000:])
    assert "Traceback" not in ended.stderr
    kept = Checkpoints(run / "checkpoints", 9)
    newest = kept.newest()
    assert newest is not None and read_state(newest)["step"] < steps
    assert f"the last good checkpoint is {newest}" in ended.stderr, ended.stderr
    assert f"run_dir={run} checkpoint.resume=true" in ended.stderr
    loaded = AutoModelForCausalLM.from_pretrained(newest / "model")
    assert loaded.num_parameters() == AutoModelForCausalLM.from_pretrained(model).num_parameters()


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    model = save_model(tmp_path / "model")
    run = small_disk / "run"
    changed: dict[str, Any] = {"train__steps": 6, "checkpoint__every": 1, "checkpoint__keep": 5}
    settings = rl_settings(tmp_path, model, run_dir=str(run), **changed)
    ended = rl(tmp_path, settings)
    ends_whole(ended, run, model, 6)
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    again = rl(tmp_path, [*settings, "checkpoint.resume=true"])
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_file_size_limit_is_told_like_a_full_disk(tmp_path: Path) -> None:
    """The third checkpoint may not write files as large as the two before it."""
    model = save_model(tmp_path / "model")
    settings = rl_settings(tmp_path, model, train__steps=4, checkpoint__every=1)
    limit = (
        "import resource\n"
        "from tunesmith.run.loop.checkpoint import Checkpoints\n"
        "save = Checkpoints.save\n"
        "def limited(self, step, *rest):\n"
        "    if step == 3:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))\n"
        "    return save(self, step, *rest)\n"
        "Checkpoints.save = limited\n"
    )
    ends_whole(rl(tmp_path, settings, limit), tmp_path / "run", model, 3)
