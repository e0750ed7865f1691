"""Environments written for TRL and OpenRLHF, as they are."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.support import tiny
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tests.support.tool_calls import call, said
from tunesmith.config.load import load_config
from tunesmith.config.schema import RewardSection, RLConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.environments.loading import EnvironmentSet
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.plan import Plan
from tunesmith.run.assembly.checking import check_run
from tunesmith.run.assembly.environments import hand_instances
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
    assert (
        "user\nCount. Reach 7.<|im_end|>" in prompt
        and "How much to add." in prompt
        and "self" not in prompt
    )
    assert "get_reward" not in prompt


def test_columns_and_arguments_of_any_name(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, NAMES, path="env.py:Names")
    task = replace(
        made_task(tokenizer), columns={"method": "a", "what": "b", "function": "c", "name": "d"}
    )
    (rollout,), _ = play(
        environments, tokenizer, [task], said([call("plot", function="f", what="w")])
    )
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

    tools = [
        {"type": "function", "function": {"name": "add"}}
    ]  # of the data: what is said goes to `step` all the same
    (rollout,), engine = play(
        environments, tokenizer, [made_task(tokenizer, label="2", tools=tools)], policy
    )
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
    assert "expected a dictionary with 'rewards', 'environment_feedback' and 'done'" in str(
        rollout.error
    )


JUDGES = """
import weakref

seen = []

def totals(environments, **columns):
    seen.extend(weakref.ref(one) for one in environments if one is not None)
    return [None if one is None else float(one.total) for one in environments]

def maybe(completions, environments=None):
    return [-1.0 if environments is None else float(environments[i].total) for i in range(len(completions))]

def blind(completions):
    return [0.0 for _ in completions]
"""


def rewarded(
    tmp_path: Path, environments: EnvironmentSet, *names: str, isolation: str = "thread"
) -> RewardSet:
    (tmp_path / "judges.py").write_text(JUDGES)
    section = {"functions": [f"judges.py:{name}" for name in names], "isolation": isolation}
    rewards = load_rewards(RewardSection.model_validate(section), tmp_path, instances=True)
    hand_instances(rewards, environments)
    return rewards


def test_rewards_get_the_instances_that_played(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, TRL, path={"count": "env.py:CounterEnv"})
    rewards = rewarded(tmp_path, environments, "totals", "maybe")
    routes = ["count", "count", "single_turn"]
    tasks = [
        made_task(tokenizer, str(n), identity=str(n), goal=7, environment=to)
        for n, to in enumerate(routes)
    ]
    turns = count()

    def policy(text: str) -> str:
        """Each episode that calls adds a number of its own."""
        if "user\n2<|im_end|>" in text or "counter:" in text:
            return "done<|im_end|>"
        return call("add", number=next(turns)) + "<|im_end|>"

    rollouts, _ = play(environments, tokenizer, tasks, policy, group_size=2, scorer=rewards)
    heard = [
        str(m["content"]) for r in rollouts[:4] for m in ok(r).messages or () if m["role"] == "tool"
    ]
    assert sorted(heard) == [f"counter: {n}" for n in range(4)]
    assert [f"counter: {r.rewards['totals']:g}" for r in rollouts[:4]] == heard, (
        "in the order of the completions"
    )
    assert all(r.rewards["maybe"] == r.rewards["totals"] for r in rollouts[:4])
    assert all(r.status is Status.REWARD_FAILED for r in rollouts[4:]), (
        "maybe has none there, and does not look"
    )
    assert all(r.instance is None for r in rollouts)
    seen = vars(sys.modules[rewards.functions[0].function.__module__])["seen"]
    deadline = monotonic() + 60
    while (
        any(one() is not None for one in seen) and monotonic() < deadline
    ):  # an episode's thread may still end
        gc.collect()
        sleep(0.01)
    assert len(seen) == 4 and all(one() is None for one in seen), "dropped with their rewards"
    rewards.close()


@pytest.mark.parametrize("name", ["maybe", "blind"])
def test_instances_are_not_kept_where_nothing_takes_them(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    native = (
        "class E:\n    def reset(self, **columns): ...\n"
        "    def step(self, action): return None, 1.0, True\n"
    )
    environments = load(
        tmp_path,
        native if name == "maybe" else TRL,
        path="env.py:" + ("E", "NoReset")[name == "blind"],
    )
    rewards = rewarded(tmp_path, environments, name)
    assert not environments.keeps_instances
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], said([]), scorer=rewards)
    assert ok(rollout).rewards[name] == (-1.0 if name == "maybe" else 0.0)
    rewards.close()


@pytest.mark.parametrize(
    ("code", "path", "reward", "environment"),
    [
        ("async def agent(client): return 1.0", "env.py:agent", "thread", "thread"),
        (TRL, "env.py:CounterEnv", "process", "thread"),
        (TRL, "env.py:CounterEnv", "thread", "process"),
    ],
)
def test_instances_that_cannot_be_handed_are_refused(
    code: str, path: str, reward: str, environment: str, tmp_path: Path
) -> None:
    environments = load(tmp_path, code, path=path, isolation=environment)
    with pytest.raises(ConfigError, match=r"judges.py:totals.*'environments'"):
        rewarded(tmp_path, environments, "totals", isolation=reward)


def test_functions_that_take_instances_derive_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(TRL)
    (tmp_path / "judges.py").write_text(JUDGES)
    model = tiny.save_model(tmp_path / "model")
    (tmp_path / "t.jsonl").write_text('{"prompt": "a", "goal": 7}\n')

    def resolved(function: str, **changed: str) -> Plan[RLConfig]:
        settings = [
            f"model.path={model}",
            f"data.train={tmp_path / 't.jsonl'}",
            "rollout.max_new_tokens=8",
            "environment.path=env.py:CounterEnv",
            f"reward.functions=['judges.py:{function}']",
            *(f"{key}={value}" for key, value in changed.items()),
        ]
        return check_run(load_config(RLConfig, None, settings), tmp_path)

    for function, kind in (("totals", "thread"), ("maybe", "thread"), ("blind", "process")):
        found = resolved(function)
        assert found.settings["reward.isolation"] == found.settings["environment.isolation"] == kind
        reasons = [d.reason for d in found.reasons if d.key.endswith(".isolation")]
        assert len(reasons) == 2 and all(
            (f"judges.py:{function}" in r) == (kind == "thread") for r in reasons
        )
    for section in ("reward", "environment"):
        with pytest.raises(ConfigError, match=f"{section}.isolation.*judges.py:totals"):
            resolved("totals", **{f"{section}.isolation": "process"})
        with pytest.raises(ConfigError, match=f"{section}.memory"):
            resolved("totals", **{f"{section}.memory": "1GB"})
