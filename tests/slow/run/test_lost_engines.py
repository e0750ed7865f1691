"""Runs whose engines are killed: they go on with those that are left, or end with what they have
learned."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.held_runs import Run

APART: dict[str, Any] = {
    "train__steps": 5,
    "checkpoint__every": 100,
    "system__engine_process": True,
    "system__engines": 2,
    "system__engine_restarts": 0,
}


def steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics() if "grad_norm" in line]


@pytest.mark.parametrize("kills", [1, 2])
def test_engines_that_are_not_replaced(tmp_path: Path, kills: int) -> None:
    """With one of two the run goes on; without any it saves its last step, and resumes."""
    run = Run(tmp_path, "run", holds=(2,), **APART)
    with run.held(2):
        killed: list[psutil.Process] = []
        for child in psutil.Process(run.process.pid).children():
            with suppress(psutil.Error):
                killed += [child] if "engine's process" in " ".join(child.cmdline()) else []
        assert len(killed) == 2
        for engine in killed[:kills]:
            engine.send_signal(signal.SIGKILL)
    if kills == 1:
        assert "1 of 2 engines" in run.finish()
        assert steps(run) == [1, 2, 3, 4, 5]
        return
    printed, _ = run.process.communicate(timeout=600)
    said = printed.decode()
    assert run.process.returncode == 1 and "Traceback" not in said, said
    assert "once too often (system.engine_restarts)" in said
    assert "checkpoint.resume=true" in said
    done = steps(run)
    assert done in ([1, 2], [1, 2, 3])
    [saved] = (run.directory / "checkpoints").glob("step-*")
    assert saved.name == f"step-{done[-1]:06d}"
    again = Run(tmp_path, "run", **APART, checkpoint__resume=True)
    again.finish()
    assert steps(again) == [1, 2, 3, 4, 5]
