"""Runs that the kernel ends at a moment, and that are continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.support.forks import popen
from tunesmith.records.metrics import read_metrics

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
KILLED = """
import random, signal, sys
from tunesmith.cli.main import main
from tunesmith.run.loop.checkpoint import Checkpoints

within, after, save = float(sys.argv.pop(1)), int(sys.argv.pop(1)), Checkpoints.save

def saved(self, step, *rest):
    made = save(self, step, *rest)
    if step > after:
        signal.raise_signal(signal.SIGPROF)
    if step == after:
        signal.setitimer(signal.ITIMER_PROF, random.uniform(1e-5, within))  # its end ends the process
    return made

Checkpoints.save = saved
main()
"""
"""A program that the kernel ends at a random moment of ``within`` seconds of its own after a
checkpoint of ``after``, and with the next checkpoint at the latest.

The time is the processor's, so that a busy machine changes nothing.
"""


def start(
    command: str, folder: Path, settings: list[str], program: Sequence[str] = ("-m", "tunesmith")
) -> subprocess.Popen[bytes]:
    (folder / "none.toml").touch()
    arguments = [sys.executable, *program, command, str(folder / "none.toml"), *settings]
    return popen(
        arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, told = process.communicate(timeout=600)
    assert process.returncode == 0, told.decode()


def seconds_of(steps: int, run: Path) -> float:
    """How long so many steps of a finished run took."""
    return steps * median(
        line["seconds"] for line in read_metrics(run / "metrics.jsonl") if "seconds" in line
    )


def killed_after(
    command: str, folder: Path, settings: list[str], steps: int, within: float
) -> None:
    """Begin a run that is killed in the next ``within`` seconds, 0.15 at most, after a checkpoint
    of ``steps``."""
    process = start(command, folder, settings, ["-c", KILLED, str(min(0.15, within)), str(steps)])
    _, told = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGPROF, told.decode()
