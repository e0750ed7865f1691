"""User code in processes: after a timeout, a crash or too much memory, only its call or its episode
fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tests.support.isolated_rewards import loading, score
from tunesmith.config.schema import RewardSection
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.usercode.killable import Pool, UserProgram
from tunesmith.types import Rollout, Status


@pytest.mark.parametrize("name", ["by_text", "by_text_later"])
def test_what_would_end_the_run_ends_its_own_call(tmp_path: Path, name: str) -> None:
    expected = {
        "fine": (Status.OK, ""),
        "backtracks": (Status.TIMED_OUT, "5 s"),
        "exits": (Status.REWARD_FAILED, "exit code 0"),
        "crashes": (Status.REWARD_FAILED, "SIGSEGV"),
        "eats": (Status.REWARD_FAILED, "MemoryError"),
        "is killed once": (Status.OK, ""),
        "is killed": (Status.REWARD_FAILED, "SIGKILL"),
    }
    with loading(tmp_path) as make:
        rewards = make(name, timeout=5.0, memory="1GB")
        found = score(rewards, *([text, "fine"] for text in expected))
    for place, (status, words) in enumerate(expected.values()):
        for rollout in found[2 * place : 2 * place + 2]:
            assert rollout.status is status and words in str(rollout.error), rollout.error


def test_a_worker_that_reads_nothing_holds_up_nobody(tmp_path: Path) -> None:
    with loading(tmp_path) as make:
        rewards = make("held", timeout=5.0)
        found = score(rewards, ["backtracks"], *(["x" * 300_000] for _ in range(4)))
    assert [r.status for r in found] == [Status.TIMED_OUT, *[Status.OK] * 4]


NETWORK = """
import os, threading, torch
imported_in = os.getpid()
assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
torch.set_num_threads(2)
torch.randn(2_000_000).exp().sum()  # starts OpenMP's threads

def judged(completions, log_extra):
    torch.randn(2_000_000).exp().sum()
    log_extra("here", [float(os.getpid() == imported_in)] * len(completions))
    log_extra("threads", [float(torch.get_num_threads())] * len(completions))
    return [1.0] * len(completions)
"""


def test_a_network_that_is_loaded_with_the_file_computes(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    section = RewardSection(functions=("network.py:judged",), isolation="process", timeout=300)
    rewards = load_rewards(section, tmp_path)
    (one,) = score(rewards, ["a"])
    rewards.close()
    assert one.status is Status.OK, one.error
    assert one.metrics == {"here": 1.0, "threads": 2.0}  # loaded once, and used with all threads


def test_a_fork_computes_without_the_threads_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "program.py").write_text(
        "import sys\nclass Program:\n    def __init__(self, place):\n"
        "        sys.path.insert(0, place)\n"
        "        import network\n        self.network = network\n"
        "    def __call__(self):\n        return self.network.judged(['a'], lambda *_: None)\n"
    )
    workers = Pool(UserProgram(tmp_path / "program.py", "Program", arguments=(str(tmp_path),)))
    assert workers.server().forks
    assert asyncio.run(workers.take()).submit("__call__").result(300) == [1.0]
    workers.close()


EPISODES = '''
import os, re, signal, time

class Guess:
    def __init__(self):
        self.steps = 0

    async def reset(self, secret, how="", **columns):
        self.secret, self.how = secret, how
        return " Begin."

    def step(self, action):
        self.steps += 1
        if self.how == "backtracks":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if self.how == "exits":
            os._exit(0)
        if self.how == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "eats":
            held = bytearray(3 << 30)
        if self.how == "raises":
            raise KeyError("of the user's")
        if self.steps < 2:
            return f"heard {action!r}", 0.25, False
        return None, float(self.secret), True

class Counter:
    """TRL's form."""

    def reset(self, secret, **columns):
        self.total = secret

    def add(self, amount: int) -> str:
        """Add an amount.

        Args:
            amount: What is added.
        """
        self.total += amount
        return f"now {self.total}"

    def get_reward(self):
        return self.total

class Agent:
    """OpenRLHF's form."""

    async def __init__(self, *args):
        self.done = False

    async def reset(self, states):
        return {"observation": states["observation"]}

    async def step(self, states):
        logs = {"n": 1, "t": "x"}
        return {"rewards": 0.5, "scores": 0.5, "environment_feedback": "", "done": True, "extra_logs": logs}
'''
CALL = '<tool_call>\n{"name": "add", "arguments": {"amount": 2}}\n</tool_call><|im_end|>'


def played(folder: Path, name: str, isolation: str, hows: list[str], **keys: Any) -> list[Rollout]:
    tokenizer = byte_level(template("qwen2"))
    environments = load(folder, EPISODES, path=f"env.py:{name}", isolation=isolation, **keys)
    tasks = [made_task(tokenizer, identity=how, secret=3, how=how) for how in hows]
    rollouts, engine = play(
        environments,
        tokenizer,
        tasks,
        lambda text: CALL if name == "Counter" and "now" not in text else "x<|im_end|>",
    )
    if len(rollouts) == 1:
        check_tokens(ok(rollouts[0]), engine)
    return rollouts


@pytest.mark.parametrize(("name", "reward"), [("Guess", 3.25), ("Counter", 5.0), ("Agent", 0.5)])
def test_an_episode_is_the_same_in_a_process(name: str, reward: float, tmp_path: Path) -> None:
    (there,) = played(tmp_path, name, "process", [""])
    (here,) = played(tmp_path, name, "thread", [""])
    assert there.reward == here.reward == reward
    assert there.token_ids == here.token_ids and there.turns == here.turns
    assert there.messages == here.messages and there.metrics == here.metrics


def test_what_would_end_the_run_ends_its_own_episode(tmp_path: Path) -> None:
    expected = {
        "fine": (Status.OK, ""),
        "backtracks": (Status.TIMED_OUT, "Guess.step did not return"),
        "exits": (Status.ENVIRONMENT_FAILED, "exit code 0"),
        "crashes": (Status.ENVIRONMENT_FAILED, "SIGSEGV"),
        "eats": (Status.ENVIRONMENT_FAILED, "MemoryError"),
        "raises": (Status.ENVIRONMENT_FAILED, "of the user's"),
        "also fine": (Status.OK, ""),
    }
    found = played(tmp_path, "Guess", "process", list(expected), timeout=8.0, memory="1GB")
    for rollout, (status, words) in zip(found, expected.values(), strict=True):
        assert rollout.status is status and words in str(rollout.error), rollout.error
        assert status is not Status.OK or rollout.reward == 3.25
    assert "env.py" in str(found[5].error) and "environment_program" not in str(found[5].error)


DRAWS = """
import numpy, random, torch

class Draws:
    def reset(self, **columns):
        return None

    def step(self, action):
        metrics = {"numpy": numpy.random.rand(), "random": random.random(), "torch": float(torch.rand(()))}
        from tunesmith.learn.environments.steps import StepResult
        return StepResult(reward=0.0, done=True, metrics=metrics)
"""


def test_episodes_side_by_side_draw_their_own_numbers(tmp_path: Path) -> None:
    tokenizer = byte_level(template("qwen2"))
    environments = load(tmp_path, DRAWS, path="env.py:Draws", isolation="process")
    tasks = [made_task(tokenizer, identity=str(number)) for number in range(3)]
    rollouts, _ = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>", timeout=600.0)
    for name in ("numpy", "random", "torch"):
        assert len({ok(rollout).metrics[name] for rollout in rollouts}) == 3, name
