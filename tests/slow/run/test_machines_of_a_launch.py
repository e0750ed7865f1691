"""Two launchers on the loopback interface, as on two machines, each with a directory of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.rank_runs import same, sft_settings, wait_for_step
from tests.support.tiny_runs import rl_settings
from tunesmith.run import placement

pytestmark = pytest.mark.timeout(600)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class Machines:
    """``torchrun --nnodes 2``: each launcher's working directory has the run file; the model is the
    settings'."""

    def __init__(
        self,
        folder: Path,
        settings: list[str],
        ranks: int = 1,
        kind: str = "sft",
        **texts: str,
    ) -> None:
        port = free_port()
        self.launchers: list[subprocess.Popen[str]] = []
        for node in range(2):
            own = folder / f"machine-{node}"
            own.mkdir(exist_ok=True)
            (own / "run.toml").write_text(texts.get(f"machine_{node}", ""))
            where = [
                "--nnodes",
                "2",
                "--node-rank",
                str(node),
                "--nproc-per-node",
                str(ranks),
                "--local-addr",
                "127.0.0.1",
            ]
            meeting = [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{port}",
                "--rdzv-id",
                folder.name,
            ]
            command = [
                *TORCHRUN,
                *where,
                *meeting,
                "-m",
                "tunesmith",
                kind,
                "run.toml",
                *settings,
            ]
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
            with (own / "output.txt").open("w") as out:
                started = subprocess.Popen(
                    command,
                    cwd=own,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=env,
                    text=True,
                    start_new_session=True,
                )
            self.launchers.append(started)
        self.folder = folder

    def said(self) -> str:
        return "".join(
            (self.folder / f"machine-{node}" / "output.txt").read_text() for node in range(2)
        )

    def first(self) -> int:
        """The node that rank 0 is on: which launcher comes first."""
        return next(
            n
            for n in range(2)
            if "run directory" in (self.folder / f"machine-{n}" / "output.txt").read_text()
        )

    def kill(self, node: int) -> None:
        """A machine and all of its processes are gone."""
        family = [psutil.Process(self.launchers[node].pid)]
        family += family[0].children(recursive=True)
        for process in family:
            process.send_signal(signal.SIGKILL)

    def end(self) -> list[int]:
        return [launcher.wait(300) for launcher in self.launchers]

    def close(self) -> None:
        for node, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                self.kill(node)
                launcher.wait(60)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Any]:
    started: list[Machines] = []

    def start(settings: list[str], **options: Any) -> Machines:
        started.append(Machines(tmp_path, settings, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_two_machines_end_as_one_process(machines: Any, model: Path, tmp_path: Path) -> None:
    alone = placement.run_sft(None, sft_settings(tmp_path, model, "alone"))
    launched = machines(sft_settings(tmp_path, model, "launched", system__zero_stage=3), ranks=2)
    assert launched.end() == [0, 0], launched.said()
    assert launched.said().count("run directory") == 1, "rank 0 alone prints"
    assert "the 2 machines have a copy each" in launched.said()
    run = tmp_path / "launched"
    same(alone, placement.RunResult(run, run / "checkpoints/step-000003/model", [], {}))


def test_a_machine_that_is_lost_ends_the_run_which_resumes(
    machines: Any, model: Path, tmp_path: Path
) -> None:
    changed = {"checkpoint__every": 2, "eval__every": 1000, "checkpoint__resume": "auto"}
    long = machines(sft_settings(tmp_path, model, "run", train__steps=400, **changed))
    wait_for_step(tmp_path / "run", 4, long.launchers[0])
    first = long.first()
    long.kill(1 - first)
    assert long.launchers[first].wait(120) != 0
    assert "rank 1 of the trainer" in long.said() and "on " in long.said()
    again = machines(sft_settings(tmp_path, model, "run", train__steps=400, **changed))
    assert "step-0000" in str([*(tmp_path / "run" / "checkpoints").iterdir()])
    wait_for_step(tmp_path / "run", 8, again.launchers[0])
    assert "from" in again.said()


def test_machines_with_other_run_files_are_refused(
    machines: Any, model: Path, tmp_path: Path
) -> None:
    texts = {f"machine_{n}": f"[train]\nseed = {n}\n" for n in range(2)}
    found = machines(sft_settings(tmp_path, model, "run"), **texts)
    assert all(found.end()), found.said()
    assert (
        "run file run.toml line 2: 'seed = 0'" in found.said()
        or "run.toml line 2: 'seed = 1'" in found.said()
    )
    assert "'seed = 0'" in found.said() and "'seed = 1'" in found.said()


def engines_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The engines that a machine's processes have started."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    return [
        one for one in family if one.cmdline()[-1:] in (["an engine"], ["the engine's process"])
    ]


@pytest.mark.long
def test_machines_with_engines_end_as_one_machine_also_when_parts_are_lost(
    machines: Any, model: Path, tmp_path: Path
) -> None:
    """Two machines of one rank and one engine each. An engine of the second is lost, which is
    replaced there; then the whole machine is, and the run resumes."""
    settings = {
        "system__device": "cpu",
        "monitor__progress": False,
        "train__steps": 30,
        "train__lr": 1e-3,
        "checkpoint__every": 5,
        "checkpoint__keep": 1,
    }
    two = {**settings, "system__trainer_ranks": 2, "system__engines": 2}
    alone = placement.run_rl(None, rl_settings(tmp_path, model, "alone", **two))
    run = tmp_path / "launched"
    again = rl_settings(tmp_path, model, "launched", **settings, checkpoint__resume="auto")

    launched = machines(again, kind="rl")
    wait_for_step(run, 6, launched.launchers[0])
    first = launched.first()
    here, there = (engines_of(launched.launchers[node]) for node in (first, 1 - first))
    assert len(here) == len(there) == 1
    there[0].kill()
    wait_for_step(run, 12, launched.launchers[0])
    assert "the engine's process on " in launched.said()
    [replacement] = engines_of(launched.launchers[1 - first])
    assert replacement.pid != there[0].pid

    launched.kill(1 - first)
    assert launched.launchers[first].wait(120) != 0
    assert "rank 1 of the trainer" in launched.said() or "process on" in launched.said()
    resumed = machines(again, kind="rl")
    assert resumed.end() == [0, 0], resumed.said()
    same(alone, placement.RunResult(run, run / "checkpoints/step-000030/model", [], {}))
    assert "2 machines 1 + 1" in (run / "config.toml").read_text()


@pytest.mark.long
def test_a_machine_that_only_has_engines_may_be_lost(
    machines: Any, model: Path, tmp_path: Path
) -> None:
    settings = {
        "system__device": "cpu",
        "monitor__progress": False,
        "train__steps": 12,
        "train__lr": 1e-3,
        "system__trainer_ranks": 1,
        "system__engines": 2,
    }
    apart = {**settings, "system__engine_process": True}
    alone = placement.run_rl(None, rl_settings(tmp_path, model, "alone", **apart))
    launched = machines(rl_settings(tmp_path, model, "launched", **settings), kind="rl")
    run = tmp_path / "launched"
    wait_for_step(run, 3, launched.launchers[0])
    first = launched.first()
    assert len(engines_of(launched.launchers[1 - first])) == 1
    launched.kill(1 - first)
    trained = run / "checkpoints/step-000012"
    deadline = time.monotonic() + 300
    while not (trained / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    same(alone, placement.RunResult(run, trained / "model", [], {}))
