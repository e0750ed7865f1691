"""``code_tests``: which program, which tests, and what counts as passed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tunesmith.config.sandboxes import ProcessSandbox
from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.rewards.code_tests import CodeTest, alike, program_in, read_tests
from tunesmith.learn.rewards.loading import check_rewards, load_rewards
from tunesmith.learn.rewards.metrics import reward_metrics
from tunesmith.learn.sandboxes.base import SandboxOutcome
from tunesmith.learn.usercode.jail import missing
from tunesmith.types import Completion, Rollout, Status, Task

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "it can")

ECHO = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)"
CALLS = {
    "fn_name": "twice",
    "inputs": [[2], ["ab"], [[1]]],
    "outputs": [4, ["abab"], [1, 1]],
}
TWICE = "def twice(x):\n    print('thinking')\n    return x * 2"


def rollout(tests: Any) -> Rollout:
    made = Rollout(Task("t", "Write it", (1, 5), {"tests": tests}))
    made.observe((1, 5))
    made.act(Completion([7, 2], [0.0, 0.0], [0, 0], "stop"))
    return made


def judged(*pairs: tuple[str, Any], **keys: Any) -> list[Rollout]:
    section = RewardSection(functions=("code_tests",), **keys)
    sandbox = ProcessSandbox(seconds=3.0, concurrency=2)
    rewards = load_rewards(section, Path(), sandbox=sandbox)
    played = [rollout(tests) for _, tests in pairs]
    asyncio.run(rewards.score(played, [text for text, _ in pairs]))
    rewards.close()
    return played


def test_the_reward_is_the_share_of_passed_tests() -> None:
    played = judged(
        (f"So:\n```python\n{ADD}\n```\n", ECHO),
        ("```\nprint(3)\n```", json.dumps(ECHO)),
        ("I do not know", {"inputs": ["1 2"], "outputs": ["3"]}),
        (f"```py\n{TWICE}\n```", CALLS),
        ("class Solution:\n    def twice(self, x):\n        return x + x if x != 2 else 5", CALLS),
        (TWICE, ["assert twice(2) == 4", "assert twice(2) == 5"]),
        (TWICE, [{"fn_name": "twice", "type": "function_call", "input": [2], "output": 4}]),
    )
    assert [r.reward for r in played] == pytest.approx([1.0, 0.5, 0.0, 1.0, 2 / 3, 0.5, 1.0])
    assert [r.metrics["answered"] for r in played] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert [r.metrics["correct"] for r in played] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert played[1].metrics["tests_passed"] == 0.5


@pytest.mark.parametrize("key", ["testtype", "type"])
def test_tests_of_a_function_without_its_name_are_refused(key: str) -> None:
    found = read_tests([{"input": "1\n2", "output": "3", key: "functional"}])
    assert isinstance(found, str) and "fn_name" in found
    assert isinstance(read_tests([{"input": "1", "output": "3", key: "stdin"}]), list)


def test_programs_that_end_early_pass_nothing() -> None:
    early = "import os, sys\nos.write(1, b'{}')\nos._exit(0)"
    played = judged(
        ("import sys\nsys.exit(0)", ["assert False"]),
        (early, CALLS),
        ("print(3)\nraise SystemExit(1)", ECHO[:1]),
    )
    assert [r.reward for r in played] == [0.0, 0.0, 0.0]


def test_all_or_nothing_without_partial_credit() -> None:
    played = judged(("print(3)", ECHO), (ADD, ECHO), partial_credit=False)
    assert [r.reward for r in played] == [0.0, 1.0]
    assert played[0].metrics["tests_passed"] == 0.5


def test_right_answers_are_a_share_of_the_answers() -> None:
    """A right program without a block of code is an answer, and one that nothing judges is none."""
    played = judged((ADD, ECHO), ("no idea", ECHO), (f"```\n{ADD}\n```", ECHO), ("```\n```", None))
    assert [r.metrics.get("answered") for r in played] == [1.0, 0.0, 1.0, None]
    told = reward_metrics(played[:3])
    assert (told["answered"], told["correct_of_answered"]) == (pytest.approx(2 / 3), 1.0)


def test_tests_that_cannot_be_used_fail_their_rollout() -> None:
    played = judged(("print(3)", "nothing"), ("print(3)", None), ("print(3)", ECHO[:1]))
    assert played[0].status is Status.REWARD_FAILED and played[1].rewards == {"code_tests": None}
    assert played[2].reward == 1.0


def test_data_is_checked_before_training(tmp_path: Path) -> None:
    rewards = load_rewards(RewardSection(functions=("code_tests",)), tmp_path)
    rewards.check_tasks([rollout(ECHO).task])
    with pytest.raises(DataError, match="tests"):
        rewards.check_tasks([rollout([{"in": 1}]).task])
    rewards.close()
    with pytest.raises(ConfigError) as refused:
        check_rewards(RewardSection(functions=("math",), partial_credit=False), tmp_path)
    assert "reward.partial_credit" in refused.value.keys


def test_the_last_block_of_python_is_the_program() -> None:
    assert program_in("```\na\n```\nor\n```python\nb\n```\n```json\n{}\n```") == "b\n"
    assert program_in("```python\nunclosed") == "unclosed"
    assert program_in("plain") == "plain"
    assert program_in("```c++\nx;\n```\nor in Python\n```python\ny\n```\nso") == "y\n"


@pytest.mark.parametrize("value", ["{", 3, {"inputs": [1], "outputs": []}, [{"input": "1"}]])
def test_values_that_are_no_tests(value: Any) -> None:
    assert isinstance(read_tests(value), str)


def test_results_are_equal_up_to_rounding() -> None:
    assert alike(0.1 + 0.2, 0.3) and alike([1, [2.0]], [1.0, [2]]) and alike({"a": 1}, {"a": 1})
    assert not alike(1, 2) and not alike([1], [1, 2]) and not alike("1", 1)
    assert not alike(10**400, 0.5)


@pytest.mark.parametrize("printed", ["[" * 100_000, "1" + "0" * 400, "9" * 5000, "NaN", ""])
def test_a_result_that_is_none_does_not_pass(printed: str) -> None:
    test = CodeTest("", 0.5, function="f")
    assert not test.passes(SandboxOutcome("ended", 0, stdout=printed))
