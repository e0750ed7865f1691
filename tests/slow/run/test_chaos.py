"""Processes of a run are killed at random moments: it ends with the right steps, and as it would
have without that."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.forks import popen
from tests.support.sums import COMMON, RL, overrides, taught_once
from tunesmith.records.metrics import read_metrics

STEPS = 60
PROMPTS = 16
REWARD = """\
def right(completions, answer, **columns):
    return [float(text[: len(gold)] == gold) for text, gold in zip(completions, answer)]
"""


class Run:
    """``tunesmith rl`` on sums, begun again by whoever killed it."""

    def __init__(self, folder: Path, model: Path, name: str, **changed: Any) -> None:
        self.folder = folder
        self.directory = folder / name
        settings = {
            "run_dir": self.directory,
            "model.path": model,
            "data.train": folder / "tasks.jsonl",
            "data.eval": folder / "tasks.jsonl",
            "reward.functions": ["math", f"{folder}/rewards.py:right"],
            "reward.weights": [0.0, 1.0],
            "train.steps": STEPS,
            "checkpoint.every": 3,
            "checkpoint.keep": 1,
            "system.engine_restarts": 50,
            "rollout.prompts_per_step": PROMPTS,
            "monitor.samples": 999,
        }
        (folder / "none.toml").touch()
        (folder / "rewards.py").write_text(REWARD)
        self.settings = overrides(COMMON | RL | settings | changed)
        self.start()

    def start(self, *more: str) -> None:
        arguments = [
            sys.executable,
            "-m",
            "tunesmith",
            "rl",
            str(self.folder / "none.toml"),
            *self.settings,
            *more,
        ]
        with (self.folder / f"{self.directory.name}.log").open("ab") as log:
            self.process = popen(
                arguments,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "NO_COLOR": "1"},
            )

    def said(self) -> str:
        return (self.folder / f"{self.directory.name}.log").read_text()

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics("grad_norm")]

    def metrics(self, name: str) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [line for line in read_metrics(self.directory / "metrics.jsonl") if name in line]
        return []

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until it holds, or the run has ended as it should: whoever waits may have been held
        up."""
        deadline = time.monotonic() + 900
        while not holds() and (code := self.process.poll()) != 0:
            assert code is None, self.said()[-3000:]
            assert time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.01)

    def victims(self, part_of_command: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if part_of_command in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def kill(self, kind: str, draw: random.Random) -> None:
        """``controller``, or what a child's command says."""
        if self.process.poll() == 0:
            return
        if kind == "controller":
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            saved = any((self.directory / "checkpoints").glob("step-*"))
            assert saved, "killed before its first checkpoint"
            self.start("checkpoint.resume=true")
            return
        self.wait_for(lambda: bool(self.victims(kind)))
        with suppress(
            psutil.Error, IndexError
        ):  # one that has ended by itself meanwhile is as good as killed
            draw.choice(self.victims(kind)).send_signal(signal.SIGKILL)

    def finish(self) -> None:
        assert self.process.wait(timeout=600) == 0, self.said()[-3000:]


def trained_on(run: Run) -> Counter[str]:
    """How often each task was trained on. Each step's groups are whole; of others come rollouts
    that failed."""
    groups: dict[tuple[int, int], str] = {}
    for line in map(json.loads, (run.directory / "rollouts.jsonl").read_text().splitlines()):
        if line["kind"] == "train":
            groups[line["step"], line["group"]] = line["task"]
    return Counter(groups.values())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return taught_once(tmp_path_factory, 0)


PLACES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "processes, playing ahead": (
        {
            "system.engine_process": True,
            "system.engines": 2,
            "rollout.max_staleness": 2,
            "rollout.partial": True,
            "rollout.over_generation": 2.0,
        },
        {"engine's process": 3, "killable_child": 3, "controller": 2},
    ),
    "ray": (
        {"system.cluster": "ray", "system.engines": 2, "system.trainer_restarts": 50},
        {"ray::Engine": 3, "ray::Trainer": 2},
    ),
}
"""Settings, and how often what is killed."""


@pytest.mark.long
@pytest.mark.parametrize(
    "place",
    ["processes, playing ahead", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))],
)
def test_whatever_is_killed_the_run_ends_as_it_should(start: tuple[Path, Path], place: str) -> None:
    folder, model = start
    changed, kills = PLACES[place]
    if place == "ray":
        pytest.importorskip("ray")
    draw = random.Random()
    victims = [kind for kind, count in kills.items() for _ in range(count)]
    draw.shuffle(victims)
    run = Run(folder, model, place, **changed)
    for number, kind in enumerate(victims):
        run.wait_for(lambda: bool(run.steps()) and run.steps()[-1] >= 4)
        due = 4 + number * (STEPS - 10) // len(victims)
        run.wait_for(lambda due=due: bool(run.steps()) and run.steps()[-1] >= due)
        time.sleep(draw.uniform(0.0, 0.3))
        run.kill(kind, draw)
    run.finish()
    assert run.steps() == list(range(1, STEPS + 1))
    assert all(
        line["rollouts"] == PROMPTS * RL["rollout.group_size"] for line in run.metrics("grad_norm")
    )
    counts = trained_on(run)
    behind = changed.get("rollout.max_staleness", 0)
    assert counts.total() == STEPS * PROMPTS
    assert max(counts.values()) - min(counts.values()) <= (
        2 if behind else 1
    )  # the last ones are still being played
    assert max(line["staleness/max"] for line in run.metrics("grad_norm")) <= behind
    before, *_, after = (line["eval/reward"] for line in run.metrics("eval/reward"))
    assert after > before + 0.15  # that it learns; how well is the matter of other tests
