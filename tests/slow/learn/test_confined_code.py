"""Tools and reward functions of the user in ``environment.sandbox = "process"``."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from tests.support.episodes import load
from tunesmith.config.sandboxes import ProcessSandbox
from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.usercode.jail import missing
from tunesmith.types import Completion, Rollout, Task

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "it can")

PEEK = textwrap.dedent("""\
    import os
    import socket
    from pathlib import Path


    def reached(run_dir):
        found = []
        for what, attempt in {
            "file": lambda: Path(run_dir, "metrics.jsonl").read_text(),
            "data": lambda: Path(run_dir).parent.parent.joinpath("train.jsonl").read_text(),
            "variable": lambda: os.environ["SOME_API_KEY"],
            "environ": lambda: Path("/proc/self/environ").read_text(),
            "socket": lambda: socket.socket(),
            "written": lambda: Path(run_dir, "x").write_text("x"),
            "helper": lambda: __import__("helper").NAME,
            "kept": lambda: os.environ["KEPT"],
            "scratch": lambda: Path("x").write_text("x"),
        }.items():
            try:
                attempt()
            except Exception:
                continue
            found.append(what)
        return " ".join(found)


    def peek(run_dir: str) -> str:
        \"\"\"Look around.

        Args:
            run_dir: where.
        \"\"\"
        return reached(run_dir)


    def reward(completions, run_dir, log_extra, **columns):
        log_extra("reached", [reached(path) for path in run_dir])
        return [1.0 for _ in completions]


    async def later(completions, **columns):
        return [2.0 for _ in completions]
""")
REACHED = "helper kept scratch"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory beside the user's files, of which one is imported when it is used."""
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("NAME = 'helper'\n")
    (tmp_path / "train.jsonl").write_text("{}")
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}")
    return folder


def test_a_tool_cannot_read_the_run_nor_the_environment(run_dir: Path) -> None:
    environments = load(
        run_dir.parent.parent,
        PEEK,
        isolation=None,
        tools=(f"{run_dir.parent.parent}/env.py:peek",),
        sandbox=ProcessSandbox(env=("KEPT",)),
    )

    async def ask() -> str:
        async with environments.open_game(environments.loaded[0]) as game:
            return await game.call_tool("peek", {"run_dir": str(run_dir)})

    assert asyncio.run(ask()) == REACHED
    environments.close()


def test_a_reward_function_cannot_either(run_dir: Path) -> None:
    base = run_dir.parent.parent
    (base / "rewards.py").write_text(PEEK)
    section = RewardSection(functions=("rewards.py:reward", "rewards.py:later"))
    rewards = load_rewards(section, base, sandbox=ProcessSandbox(env=("KEPT",)))
    rollout = Rollout(Task("t", "p", (1,), {"run_dir": str(run_dir)}))
    rollout.act(Completion([7], [0.0], [0], "stop"))
    asyncio.run(rewards.score([rollout], ["x"]))
    rewards.close()
    assert rollout.reward == 3.0 and rollout.notes["reached"] == REACHED


def test_code_that_starts_threads_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True)"
    (tmp_path / "rewards.py").write_text(f"{code}.start()\n{PEEK}")
    section = RewardSection(functions=("rewards.py:reward",))
    with pytest.raises(ConfigError, match="threads"):
        load_rewards(section, tmp_path, sandbox=ProcessSandbox())


def test_a_tool_that_takes_all_memory_ends_alone(run_dir: Path) -> None:
    base = run_dir.parent.parent
    code = 'def fill() -> int:\n    """Fill the memory."""\n    return len(bytes(10**10))\n'
    environments = load(
        base, code, isolation=None, tools=(f"{base}/env.py:fill",), sandbox=ProcessSandbox()
    )

    async def ask() -> str:
        async with environments.open_game(environments.loaded[0]) as game:
            return await game.call_tool("fill", {})

    assert "MemoryError" in asyncio.run(ask())
    environments.close()
