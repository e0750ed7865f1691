"""Episodes in worker processes: the same outcome as on threads, and nothing that ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_tokenizers import byte_level, template
from episodes import check_tokens, load, made_task, ok, play
from tunesmith.errors import ConfigError
from tunesmith.types import Rollout, Status

CODE = '''
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


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level(template("qwen2"))


def played(folder: Path, tokenizer: Any, name: str, isolation: str, hows: list[str], **keys: Any) -> list[Rollout]:
    environments = load(folder, CODE, path=f"env.py:{name}", isolation=isolation, **keys)
    tasks = [made_task(tokenizer, identity=how, secret=3, how=how) for how in hows]
    rollouts, engine = play(
        environments, tokenizer, tasks, lambda text: CALL if name == "Counter" and "now" not in text else "x<|im_end|>"
    )
    if len(rollouts) == 1:
        check_tokens(ok(rollouts[0]), engine)
    return rollouts


@pytest.mark.parametrize(("name", "reward"), [("Guess", 3.25), ("Counter", 5.0), ("Agent", 0.5)])
def test_an_episode_is_the_same_in_a_process(name: str, reward: float, tokenizer: Any, tmp_path: Path) -> None:
    (there,) = played(tmp_path, tokenizer, name, "process", [""])
    (here,) = played(tmp_path, tokenizer, name, "thread", [""])
    assert there.reward == here.reward == reward
    assert there.token_ids == here.token_ids and there.turns == here.turns
    assert there.messages == here.messages and there.metrics == here.metrics


def test_what_would_end_the_run_ends_its_own_episode(tokenizer: Any, tmp_path: Path) -> None:
    expected = {
        "fine": (Status.OK, ""),
        "backtracks": (Status.TIMED_OUT, "Guess.step did not return"),
        "exits": (Status.ENVIRONMENT_FAILED, "exit code 0"),
        "crashes": (Status.ENVIRONMENT_FAILED, "SIGSEGV"),
        "eats": (Status.ENVIRONMENT_FAILED, "MemoryError"),
        "raises": (Status.ENVIRONMENT_FAILED, "of the user's"),
        "also fine": (Status.OK, ""),
    }
    found = played(tmp_path, tokenizer, "Guess", "process", list(expected), timeout=4.0, memory="1GB")
    for rollout, (status, words) in zip(found, expected.values(), strict=True):
        assert rollout.status is status and words in str(rollout.error), rollout.error
        assert status is not Status.OK or rollout.reward == 3.25
    assert "env.py" in str(found[5].error) and "environment_program" not in str(found[5].error)


def test_a_limit_that_no_thread_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.memory"):
        load(tmp_path, CODE, path="env.py:Guess", isolation="thread", memory="1GB")


DRAWS = """
import numpy, random, torch

class Draws:
    def reset(self, **columns):
        return None

    def step(self, action):
        metrics = {"numpy": numpy.random.rand(), "random": random.random(), "torch": float(torch.rand(()))}
        from tunesmith.environments.steps import StepResult
        return StepResult(reward=0.0, done=True, metrics=metrics)
"""


def test_episodes_side_by_side_draw_their_own_numbers(tmp_path: Path) -> None:
    tokenizer = byte_level(template("qwen2"))
    environments = load(tmp_path, DRAWS, path="env.py:Draws", isolation="process")
    tasks = [made_task(tokenizer, identity=str(number)) for number in range(3)]
    rollouts, _ = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>", timeout=60.0)
    for name in ("numpy", "random", "torch"):
        assert len({ok(rollout).metrics[name] for rollout in rollouts}) == 3, name
