"""Environments written for TRL and OpenRLHF, as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_tokenizers import byte_level, template
from episodes import check_tokens, load, made_task, ok, play
from test_tools import call, said
from tunesmith.types import Status

TRL = '''
class CounterEnv:
    """As in TRL's documentation of environment_factory: public methods are tools, the reward is an attribute."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.goal = kwargs["goal"]
        self.total = 0
        return f" Reach {self.goal}."

    def add(self, number: int) -> str:
        """
        Add to the counter.

        Args:
            number: How much to add.

        Returns:
            The counter.
        """
        if number > 5:
            raise ValueError("too much at once")
        self.total += number
        self.reward = float(self.total == self.goal)
        return f"counter: {self.total}"

class OwnReward(CounterEnv):
    def get_reward(self) -> float:
        return 10.0 * self.reward

class NoReset:
    async def look(self) -> str:
        """Look around."""
        return "a wall"
'''


NAMES = '''
class Names:
    """Its arguments have the names that our own functions have for theirs."""

    def reset(self, method, what, function, name):
        self.said = f"{method} {what} {function} {name}"

    def plot(self, function: str, what: str) -> str:
        """
        Draw.

        Args:
            function: What to draw.
            what: And how.
        """
        return f"{self.said}: {function} {what}"
'''


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level(template("qwen2"))


@pytest.mark.parametrize(("name", "reward"), [("CounterEnv", 1.0), ("OwnReward", 10.0)])
def test_a_trl_environment(name: str, reward: float, tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, TRL, path=f"env.py:{name}")
    task = made_task(tokenizer, "Count.", goal=7)
    policy = said([call("add", number=9), call("add", number=5), call("add", number=2)])
    (rollout,), engine = play(environments, tokenizer, [task], policy)
    check_tokens(ok(rollout), engine)
    assert rollout.reward == reward and len(rollout.records) == 1
    assert rollout.messages is not None
    heard = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert heard == ["Error: ValueError: too much at once", "counter: 5", "counter: 7"]
    prompt = tokenizer.decode(rollout.token_ids[: rollout.turns[0].start])
    assert "user\nCount. Reach 7.<|im_end|>" in prompt and "How much to add." in prompt and "self" not in prompt
    assert "get_reward" not in prompt


def test_columns_and_arguments_of_any_name(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, NAMES, path="env.py:Names")
    task = replace(made_task(tokenizer), columns={"method": "a", "what": "b", "function": "c", "name": "d"})
    (rollout,), _ = play(environments, tokenizer, [task], said([call("plot", function="f", what="w")]))
    assert ok(rollout).messages is not None
    assert [m["content"] for m in rollout.messages or () if m["role"] == "tool"] == ["a b c d: f w"]


def test_a_trl_environment_of_tools_alone(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, TRL, path="env.py:NoReset")
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], said([call("look")]))
    assert ok(rollout).reward is None and rollout.metrics["turns"] == 2.0


OPENRLHF = """
class Tensor:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)

class AgentInstance:
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        assert "<|im_start|>user\\nGo." in states["observation_text"]
        assert states["observation_text"].count("tries") == self.step_idx
        self.step_idx += 1
        done = states["action_text"] == states["label"]
        return {
            "rewards": Tensor(done),
            "scores": Tensor(done),
            "environment_feedback": "" if done else "\\n<|im_start|>user\\ntries<|im_end|>\\n<|im_start|>assistant\\n",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"steps": self.step_idx, "how": "won", "none": None},
        }

class Later(AgentInstance):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": "<|im_start|>user\\nGo. Now.<|im_end|>\\n<|im_start|>assistant\\n"}

class Wrong(AgentInstance):
    async def step(self, states: dict, **kwargs):
        return {"reward": 1.0}
"""


@pytest.mark.parametrize("name", ["AgentInstance", "Later"])
def test_an_openrlhf_agent_instance(name: str, tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, OPENRLHF, path=f"env.py:{name}")

    def policy(text: str) -> str:
        return f"{text.count('tries')}<|im_end|>"

    tools = [{"type": "function", "function": {"name": "add"}}]  # of the data: what is said goes to `step` all the same
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer, label="2", tools=tools)], policy)
    check_tokens(ok(rollout), engine)
    assert rollout.reward == 1.0 and len(rollout.records) == 1 and len(rollout.turns) == 3
    assert rollout.metrics["steps"] == 3.0 and rollout.metrics["scores"] == 1.0
    assert not {"how", "none"} & rollout.metrics.keys()
    again = "<|im_end|>\n<|im_start|>user\ntries<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rollout.completion_ids) == f"0{again}1{again}2<|im_end|>"
    assert ("Now" in tokenizer.decode(rollout.token_ids)) == (name == "Later")


def test_a_wrong_dictionary_is_told(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, OPENRLHF, path="env.py:Wrong")
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], lambda _: "x<|im_end|>")
    assert rollout.status is Status.ENVIRONMENT_FAILED
    assert "expected a dictionary with 'rewards', 'environment_feedback' and 'done'" in str(rollout.error)
