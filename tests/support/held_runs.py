"""Runs of ``tunesmith rl`` in processes of their own, which a test holds in a step while it does
something to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from tests.support.forks import popen
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

HOLDING = """
import time
from pathlib import Path

def share(completions, trainer_state, **columns):
    step = trainer_state.global_step
    Path(__file__).with_name(f"came to {step}").touch()
    while Path(__file__).with_name(f"holds {step}").exists():
        time.sleep(0.01)
    return [sum(c < "N" for c in text) / max(1, len(text)) for text in completions]
"""
"""The reward of ``tiny_runs``; it holds the steps that a test names until the test has done what it
wants to."""


def hold(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """The settings of a run that waits in the rollouts of these steps until it is ``let_go``."""
    (folder / "holding.py").write_text(HOLDING)
    for step in steps:
        (folder / f"holds {step}").touch()
    return {"reward__functions": [f"{folder}/holding.py:share"], "reward__timeout": 600}


def let_go(folder: Path, step: int) -> None:
    (folder / f"holds {step}").unlink()


class Ended:
    """A run that has ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    def weights(self) -> dict[str, torch.Tensor]:
        newest = max((self.directory / "checkpoints").glob("step-*"))
        return load_file(newest / "model/model.safetensors")


def actors_below(process: psutil.Process, name: str) -> list[psutil.Process]:
    """The actors that ``ps`` shows under this name, among the process's descendants."""
    found: list[psutil.Process] = []
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            found += [child] if "".join(child.cmdline()).startswith(f"ray::{name}") else []
    return found


def inside(folder: Path, text: str = "", **changed: Any) -> Ended:
    """What comes out where everything is in this process."""
    (folder / "inside.toml").write_text(text)
    settings = rl_settings(folder, save_model(folder / "model"), "inside", **changed)
    return Ended(assembly.run_rl(folder / "inside.toml", settings).run_dir)


class Run(Ended):
    """``tunesmith rl`` in a process of its own.

    Args:
        holds: steps in whose rollouts it waits for ``held``.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        text: str = "",
        environment: dict[str, str] | None = None,
        holds: Sequence[int] = (),
        **changed: Any,
    ) -> None:
        super().__init__(folder / name)
        self.folder = folder
        if holds:
            changed |= hold(folder, holds)
        model = folder / "model"
        if not model.exists():
            save_model(model)
        file = folder / f"{name}.toml"
        file.write_text(text)
        settings = rl_settings(folder, model, name, **changed)
        arguments = [sys.executable, "-m", "tunesmith", "rl", str(file), *settings]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **(environment or {})}
        self.process = popen(
            arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )

    def finish(self) -> str:
        said, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, said.decode()
        return said.decode()

    def wait_for(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 600
        while not holds():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.process.communicate()
            )
            time.sleep(0.01)

    @contextmanager
    def held(self, step: int) -> Generator[None]:
        """While the run waits in a step of ``holds``."""
        self.wait_for((self.folder / f"came to {step}").exists)
        yield
        let_go(self.folder, step)

    def kill(self, actor: str) -> None:
        """The oldest of the actors that ``ps`` shows under this name: a newer one may not have
        joined yet."""
        self.wait_for(lambda: self.actors(actor))  # one may be about to take the place of another
        killed = min(self.actors(actor), key=psutil.Process.create_time)
        killed.send_signal(signal.SIGKILL)
        psutil.wait_procs([killed], timeout=600)

    def actors(self, name: str) -> list[psutil.Process]:
        return actors_below(psutil.Process(self.process.pid), name)
