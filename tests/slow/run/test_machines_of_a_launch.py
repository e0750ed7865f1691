"""Two launchers on the loopback interface, as on two machines, each with a directory of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.held_runs import hold, let_go
from tests.support.rank_runs import same, sft_settings, wait_for_step
from tests.support.tiny_runs import rl_settings
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

pytestmark = pytest.mark.timeout(600)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class Machines:
    """``torchrun --nnodes 2``: each launcher's working directory has the run file; the model is the
    settings'. Rank 0 is on machine 0."""

    def __init__(
        self,
        folder: Path,
        settings: list[str],
        ranks: int = 1,
        kind: str = "sft",
        **texts: str,
    ) -> None:
        self.folder = folder
        port = free_port()
        meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        each = ["--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
        command = [*TORCHRUN, *meeting, *each, "--node-rank"]
        self._commands = [
            [*command, str(node), "-m", "tunesmith", kind, "run.toml", *settings]
            for node in range(2)
        ]
        for node in range(2):
            own = folder / f"machine-{node}"
            own.mkdir(exist_ok=True)
            (own / "run.toml").write_text(texts.get(f"machine_{node}", ""))
        self.launchers = [self._start(node) for node in range(2)]

    def _start(self, node: int) -> subprocess.Popen[str]:
        own = self.folder / f"machine-{node}"
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        with (own / "output.txt").open("a") as out:
            return subprocess.Popen(
                self._commands[node],
                cwd=own,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                text=True,
                start_new_session=True,
            )

    def start_again(self, node: int) -> None:
        """A machine that was lost is back."""
        self.launchers[node] = self._start(node)

    def wait_for(self, holds: Callable[[], Any]) -> None:
        """Wait for what machine 0 does."""
        deadline = time.monotonic() + 300
        while not holds():
            assert self.launchers[0].poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    @contextmanager
    def held(self, step: int) -> Generator[None]:
        """While the run waits in a step that ``hold`` names."""
        self.wait_for((self.folder / f"came to {step}").exists)
        yield
        let_go(self.folder, step)

    def said(self) -> str:
        return "".join(
            (self.folder / f"machine-{node}" / "output.txt").read_text() for node in range(2)
        )

    def kill(self, node: int) -> None:
        """A machine and all of its processes are gone."""
        family = [psutil.Process(self.launchers[node].pid)]
        family += family[0].children(recursive=True)
        for process in family:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family[1:], timeout=60)
        self.launchers[node].wait(60)

    def end(self) -> list[int]:
        return [launcher.wait(300) for launcher in self.launchers]

    def close(self) -> None:
        for node, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                self.kill(node)


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
    alone = assembly.run_sft(None, sft_settings(tmp_path, model, "alone"))
    launched = machines(sft_settings(tmp_path, model, "launched", system__zero_stage=3), ranks=2)
    assert launched.end() == [0, 0], launched.said()
    assert launched.said().count("run directory") == 1, "rank 0 alone prints"
    assert "the 2 machines have a copy each" in launched.said()
    run = tmp_path / "launched"
    same(alone, assembly.RunResult(run, run / "checkpoints/step-000003/model", [], {}))


def test_a_machine_that_is_lost_ends_the_run_which_resumes(
    machines: Any, model: Path, tmp_path: Path
) -> None:
    changed = {"checkpoint__every": 2, "eval__every": 1000, "checkpoint__resume": "auto"}
    long = machines(sft_settings(tmp_path, model, "run", train__steps=400, **changed))
    wait_for_step(tmp_path / "run", 4, long.launchers[0])
    long.kill(1)
    assert long.launchers[0].wait(120) != 0
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
    settings: dict[str, Any] = {
        "system__device": "cpu",
        "monitor__progress": False,
        "train__steps": 6,
        "train__lr": 1e-3,
        "checkpoint__every": 1,
        "checkpoint__keep": 1,
        **hold(tmp_path, ()),
    }
    two = {**settings, "system__trainer_ranks": 2, "system__engines": 2}
    alone = assembly.run_rl(None, rl_settings(tmp_path, model, "alone", **two))
    for step in range(1, 7):
        (tmp_path / f"came to {step}").unlink(missing_ok=True)
    hold(tmp_path, (2, 4))
    run = tmp_path / "launched"
    again = rl_settings(tmp_path, model, "launched", **settings, checkpoint__resume="auto")

    launched = machines(again, kind="rl")
    with launched.held(2):
        here, there = (engines_of(launcher) for launcher in launched.launchers)
        assert len(here) == len(there) == 1
        there[0].kill()
    with launched.held(4):
        assert "the engine's process on " in launched.said()
        [replacement] = engines_of(launched.launchers[1])
        assert replacement.pid != there[0].pid
        launched.kill(1)
    assert launched.launchers[0].wait(120) != 0
    assert "rank 1 of the trainer" in launched.said() or "process on" in launched.said()
    resumed = machines(again, kind="rl")
    assert resumed.end() == [0, 0], resumed.said()
    same(alone, assembly.RunResult(run, run / "checkpoints/step-000006/model", [], {}))
    assert "2 machines 1 + 1" in (run / "config.toml").read_text()


def test_a_machine_that_only_has_engines_may_be_lost_and_come_back(
    machines: Any, model: Path, tmp_path: Path
) -> None:
    """The run takes its steps with the other engine, and with both when the machine is back."""
    settings: dict[str, Any] = {
        "system__device": "cpu",
        "monitor__progress": False,
        "train__steps": 6,
        "train__lr": 1e-3,
    }
    alone = assembly.run_rl(None, rl_settings(tmp_path, model, "alone", **settings))
    settings |= {"system__trainer_ranks": 1, "system__engines": 2, **hold(tmp_path, (2, 4))}
    launched = machines(rl_settings(tmp_path, model, "launched", **settings), kind="rl")
    with launched.held(2):
        assert len(engines_of(launched.launchers[1])) == 1
        launched.kill(1)
    with launched.held(4):
        launched.start_again(1)
        launched.wait_for(lambda: "2 of 2 engines" in launched.said())
        assert len(engines_of(launched.launchers[1])) == 1
    assert launched.end() == [0, 0], launched.said()
    run = tmp_path / "launched"
    same(alone, assembly.RunResult(run, run / "checkpoints/step-000006/model", [], {}))
    engines = {line["step"]: line["engines"] for line in read_metrics(run / "metrics.jsonl")}
    assert engines[4] == 1 and engines[6] == 2
