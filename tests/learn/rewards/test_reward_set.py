"""Scoring rollouts with the user's functions: TRL's signature, typed failures, weights, the
gate."""
# ruff: noqa: ARG001 (reward functions take what they are given)

from __future__ import annotations

import asyncio
import functools
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.documents import ROOT, blocks_of
from tunesmith.config.families import DynamicFilter
from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError, DataError, RewardError
from tunesmith.learn.algorithms import filtering
from tunesmith.learn.algorithms.advantages import GDPO
from tunesmith.learn.algorithms.outcomes import Outcome
from tunesmith.learn.rewards.function import RewardFunction, required_columns
from tunesmith.learn.rewards.loading import check_rewards, user_reward
from tunesmith.learn.rewards.metrics import check_failed, reward_metrics
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.rewards.trainer_state import TrainerState
from tunesmith.learn.usercode import calls as user_calls
from tunesmith.learn.usercode.calls import kept_default_dtype
from tunesmith.types import Completion, Message, Rollout, RolloutGroup, Status, Task


def rollout(
    task: str = "t", prompt: str | list[Message] = "q", ids: Sequence[int] = (7, 2), **columns: Any
) -> Rollout:
    made = Rollout(Task(task, prompt, (1, 5), columns))
    made.observe((1, 5))
    made.act(Completion(list(ids), [0.0] * len(ids), [0] * len(ids), "stop"))
    return made


def reward_set(
    *functions: Callable[..., Any], weights: Sequence[float] | None = None, timeout: float = 60.0
) -> RewardSet:
    made: list[RewardFunction] = []
    for f in functions:
        name = getattr(f, "__name__", "f")
        made.append(RewardFunction(name, f"rewards.py:{name}", f, required_columns(f, name)))
    return with_functions(made, weights or [1.0] * len(made), timeout)


def with_functions(
    functions: Sequence[RewardFunction], weights: Sequence[float], timeout: float = 60.0
) -> RewardSet:
    made = RewardSet(
        {f.name: weight for f, weight in zip(functions, weights, strict=True)}, timeout
    )
    for f in functions:
        made.add(f)
    return made


def score(
    rewards: RewardSet, rollouts: Sequence[Rollout], texts: Sequence[str] | None = None
) -> None:
    try:
        asyncio.run(rewards.score(rollouts, texts or ["a"] * len(rollouts)))
    finally:
        rewards.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


OVERRUN = 0.05
"""The timeout of calls that overrun it; all others have time."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of the first call that overruns counts from the first entry of this, and so on."""
    counted = list[int]()
    overrunning = itertools.count(1)
    within = user_calls.done_within

    async def waits(future: Future[object], timeout: float) -> bool:
        if timeout == OVERRUN:
            number = next(overrunning)
            await until(lambda: len(counted) >= number)
        return await within(future, timeout)

    monkeypatch.setattr(user_calls, "done_within", waits)
    return counted


def test_gets_what_trl_gives() -> None:
    seen: dict[str, Any] = {}

    def f(**given: Any) -> list[float]:
        seen.update(given)
        return [0.0, 1.0]

    rewards = reward_set(f)
    rewards.state = TrainerState(global_step=3, max_steps=10)
    rollouts = [
        rollout(ids=(7, 2), answer="4", prompt_extra=1, prompt="a"),
        rollout(ids=(8,), answer="5", prompt="a"),
    ]
    score(rewards, rollouts, ["four", "five"])
    reserved = {
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
    }
    assert set(seen) == reserved | {"answer", "prompt_extra"}
    assert seen["prompts"] == ["a", "a"]
    assert seen["completions"] == ["four", "five"]
    assert seen["completion_ids"] == [[7, 2], [8]]
    assert seen["answer"] == ["4", "5"]
    assert seen["prompt_extra"] == [1, None]
    assert seen["trainer_state"].global_step == 3
    assert [r.reward for r in rollouts] == [0.0, 1.0]
    assert rollouts[1].rewards == {"f": 1.0}


def test_conversational_prompts_give_messages_and_the_task_stays_as_it_was() -> None:
    prompt: list[Message] = [{"role": "user", "content": "2+2?"}]

    def f(prompts: list[list[Message]], completions: list[list[Message]]) -> list[float]:
        prompts[0].append(completions[0][0])
        prompts[0][0]["content"] = "?"
        return [float(completions[0] == [{"role": "assistant", "content": "4"}])]

    one = rollout(prompt=prompt)
    score(reward_set(f), [one], ["4"])
    assert one.reward == 1.0
    assert prompt == [{"role": "user", "content": "2+2?"}]


def test_every_way_to_write_a_function() -> None:
    def named(completions: list[str], answer: list[str]) -> list[float]:
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def keyword_only(*, completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    def nothing_needed(completions: list[str], missing: object = "default") -> list[float]:
        return [float(missing == "default")] * len(completions)

    async def asynchronous(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.5] * len(completions)

    class Judge:
        __name__ = "judge"

        async def __call__(self, completions: list[str], **_: Any) -> list[bool]:
            return [True] * len(completions)

    def scaled(completions: list[str], factor: float, **_: Any) -> Any:
        return np.full(len(completions), factor, dtype=np.float32)

    partial = functools.partial(scaled, factor=0.25)
    one = rollout(answer="a")
    score(reward_set(named, keyword_only, nothing_needed, asynchronous, Judge(), partial), [one])
    assert one.rewards == {
        "named": 1.0,
        "keyword_only": 2.0,
        "nothing_needed": 1.0,
        "asynchronous": 0.5,
        "judge": 1.0,
        "f": 0.25,
    }
    assert one.reward == 5.75


def test_weighted_sum_over_the_rewards_that_apply() -> None:
    def a(completions: list[str]) -> list[float | None]:
        return [1.0, None, None, None]

    def b(completions: list[str]) -> list[float | None]:
        return [0.5, 0.5, None, None]

    def watched(completions: list[str]) -> list[float | None]:
        return [9.0, 9.0, 9.0, None]

    four = [rollout() for _ in range(4)]
    score(reward_set(a, b, watched, weights=[2.0, -1.0, 0.0]), four)
    assert [r.reward for r in four] == [1.5, -0.5, None, None]
    assert [r.status for r in four] == [
        Status.OK,
        Status.OK,
        Status.REWARD_FAILED,
        Status.REWARD_FAILED,
    ]
    assert four[0].rewards == {"a": 1.0, "b": 0.5, "watched": 9.0}
    assert "no reward function applies" in str(four[3].error)


def test_an_environments_own_reward_is_added_to() -> None:
    def f(completions: list[str]) -> list[float | None]:
        return [1.0, None]

    two = [rollout(), rollout()]
    for r in two:
        r.reward = 0.25
    score(reward_set(f), two)
    assert [r.reward for r in two] == [1.25, 0.25]


@pytest.mark.parametrize(("weight", "value"), [(-0.5, 0.2), (1.0, 1.0)])
def test_what_an_environment_pays_is_a_reward_by_itself(weight: float, value: float) -> None:
    """The dynamic filter and gdpo see it beside a penalty, or a reward that is always the same."""

    def f(completions: list[str]) -> list[float]:
        return [value] * len(completions)

    two = [rollout(), rollout()]
    two[0].reward = 1.0
    two[1].reward = 0.0
    rewards = reward_set(f, weights=[weight])
    score(rewards, two)
    assert [r.rewards for r in two] == [
        {"f": value, "environment": 1.0},
        {"f": value, "environment": 0.0},
    ]
    group = RolloutGroup(two[0].task, two)
    assert filtering.split(DynamicFilter(), [group], rewards.weights) == ([group], [])
    first, second = GDPO()(
        [Outcome(0, r.reward or 0.0, r.num_sampled, r.rewards) for r in group.usable]
    ).advantages
    assert first.min() > 0 > second.max()


def test_no_reward_takes_the_environments_name(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def environment(completions): ...\n")
    section = RewardSection(functions=("rewards.py:environment",))
    with pytest.raises(ConfigError, match="called 'environment'"):
        check_rewards(section, tmp_path)


def test_rollouts_that_failed_before_are_not_scored() -> None:
    def f(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    two = [rollout(), rollout()]
    two[0].fail(Status.ENGINE_FAILED, "gone")
    score(reward_set(f), two)
    assert (two[0].status, two[0].reward) == (Status.ENGINE_FAILED, None)
    assert two[1].reward == 1.0


@pytest.mark.parametrize("kind", ["plain", "async", "exit", "cancelled"])
def test_raising_fails_the_call_and_keeps_the_users_traceback(kind: str) -> None:
    def explode() -> None:
        raise {"exit": SystemExit, "cancelled": asyncio.CancelledError}.get(kind, KeyError)("inner")

    def plain(completions: list[str]) -> list[float]:
        explode()
        return []

    async def asynchronous(completions: list[str]) -> list[float]:
        return plain(completions)

    def fine(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    two = [rollout(), rollout("u")]
    score(reward_set(plain if kind == "plain" else asynchronous, fine), two)
    for r in two:
        assert (r.status, r.reward) == (Status.REWARD_FAILED, None)
        assert r.rewards == {"fine": 1.0}
        error = str(r.error)
        assert "in explode" in error and "inner" in error and "call of 2 completions" in error
        assert "user_calls.py" not in error
    assert "task u" in str(two[1].error)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (None, "None (of type NoneType)"),
        (1.0, "1.0 (of type float)"),
        ("ab", "'ab' (of type str)"),
        ({0: 1.0, 1: 2.0}, "of type dict"),
    ],
)
def test_unusable_output_fails_the_call(output: object, words: str) -> None:
    def f(completions: list[str]) -> object:
        return output

    two = [rollout(), rollout()]
    score(reward_set(f), two)
    for r in two:
        assert (r.status, r.reward) == (Status.REWARD_FAILED, None)
        assert words in str(r.error) and "'rewards.py:f'" in str(r.error)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), "1.0", [1.0], 10**400]
)
def test_an_unusable_item_fails_its_rollout_only(value: object) -> None:
    def f(completions: list[str]) -> list[object]:
        return [True, value, 0]

    three = [rollout() for _ in range(3)]
    score(reward_set(f), three)
    assert [r.reward for r in three] == [1.0, None, 0.0]
    assert three[1].status is Status.REWARD_FAILED
    assert "at index 1" in str(three[1].error)


def test_a_forgotten_async_is_explained() -> None:
    async def inner() -> list[float]:
        return [1.0]

    made: list[Any] = []

    def f(completions: list[str]) -> object:
        made.append(inner())
        return made[0]

    one = rollout()
    score(reward_set(f), [one])
    made[0].close()
    assert "async def" in str(one.error)


def test_a_hanging_call_fails_in_time_and_the_next_one_works(begun: list[int]) -> None:
    release = threading.Event()

    def sticky(completions: list[str]) -> list[float]:
        begun.append(1)
        if len(begun) == 1:
            release.wait(600)
        return [1.0] * len(completions)

    async def both() -> tuple[Rollout, Rollout]:
        first = rollout()
        second = rollout()
        hanging = asyncio.create_task(rewards.score([first], ["a"]))
        await until(lambda: bool(begun))
        rewards._timeout = 60.0  # of calls from now on
        await asyncio.gather(hanging, rewards.score([second], ["a"]))
        return first, second

    rewards = reward_set(sticky, timeout=OVERRUN)
    first, second = asyncio.run(both())
    assert (first.status, first.reward) == (Status.TIMED_OUT, None)
    assert "within 0.05 s" in str(first.error)
    assert second.reward == 1.0
    assert rewards.metrics([first, second])["reward/abandoned_threads"] == 1
    release.set()
    rewards.close()


def test_after_three_overruns_waiting_calls_fail_untried_and_later_ones_are_tried(
    begun: list[int],
) -> None:
    release = threading.Event()

    def hangs(completions: list[str]) -> list[float]:
        begun.append(1)
        release.wait(600)
        return [1.0]

    rewards = reward_set(hangs, timeout=OVERRUN)

    async def run() -> list[Rollout]:
        many = [rollout() for _ in range(20)]
        await asyncio.gather(*(rewards.score([r], ["a"]) for r in many))
        release.set()
        later = rollout()
        rewards._timeout = 60.0
        await rewards.score([later], ["a"])
        return [*many, later]

    *many, later = asyncio.run(run())
    statuses = [r.status for r in many]
    assert (statuses.count(Status.TIMED_OUT), statuses.count(Status.NOT_TRIED)) == (3, 17)
    assert len(begun) == 4
    assert later.reward == 1.0
    rewards.close()


def test_plain_functions_run_one_at_a_time() -> None:
    running = [0]
    most = [0]

    def f(completions: list[str]) -> list[float]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.005)
        running[0] -= 1
        return [1.0]

    def g(completions: list[str]) -> list[float]:
        return f(completions)

    rewards = reward_set(f, g)

    async def run() -> None:
        await asyncio.gather(*(rewards.score([rollout()], ["a"]) for _ in range(5)))

    asyncio.run(run())
    rewards.close()
    assert most == [1]


def test_async_overruns_are_cancelled_and_others_go_on(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "ANSWER_SECONDS", 60.0)
    cancelled = threading.Event()

    async def slow(completions: list[str]) -> list[float]:
        begun.append(1)
        try:
            await asyncio.sleep(600 if completions[0] == "slow" else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0]

    rewards = reward_set(slow, timeout=OVERRUN)

    async def run() -> list[Rollout]:
        pair = [rollout(), rollout()]
        overrunning = asyncio.create_task(rewards.score(pair[:1], ["slow"]))
        await until(lambda: bool(begun))
        rewards._timeout = 60.0  # of calls from now on
        await asyncio.gather(overrunning, rewards.score(pair[1:], ["quick"]))
        return pair

    slow_one, quick = asyncio.run(run())
    assert slow_one.status is Status.TIMED_OUT
    assert quick.reward == 1.0
    assert cancelled.wait(60)  # it happens in the function's own thread
    assert "reward/abandoned_threads" not in rewards.metrics([quick])
    rewards.close()


def test_an_async_function_that_blocks_does_not_block_the_run(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "ANSWER_SECONDS", 0.0)
    release = threading.Event()

    async def blocks(completions: list[str]) -> list[float]:
        begun.append(1)
        if completions[0] == "block":
            release.wait(600)
        return [1.0]

    rewards = reward_set(blocks, timeout=OVERRUN)

    async def run() -> tuple[Rollout, Rollout]:
        stuck = rollout()
        later = rollout()
        await rewards.score([stuck], ["block"])
        rewards._timeout = 60.0
        await rewards.score([later], ["a"])
        return stuck, later

    stuck, later = asyncio.run(run())
    assert stuck.status is Status.TIMED_OUT and "blocks its event loop" in str(stuck.error)
    assert later.reward == 1.0
    release.set()
    rewards.close()


def test_a_cancelled_score_leaves_no_thread_in_the_way() -> None:
    hangs = threading.Event()
    release = threading.Event()

    def f(completions: list[str]) -> list[float]:
        if completions[0] == "hang":
            hangs.set()
            release.wait(600)
        return [1.0]

    rewards = reward_set(f)

    async def run() -> Rollout:
        hanging = asyncio.create_task(rewards.score([rollout()], ["hang"]))
        await until(hangs.is_set)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        later = rollout()
        await rewards.score([later], ["a"])
        return later

    assert asyncio.run(run()).reward == 1.0
    release.set()
    rewards.close()


def test_the_process_ends_although_a_reward_hangs(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import time\ndef f(completions):\n    time.sleep(600)\n")
    program = textwrap.dedent("""
        import asyncio
        from pathlib import Path
        from tunesmith.config.schema import RewardSection
        from tunesmith.learn.rewards.loading import load_rewards
        from tunesmith.types import Rollout, Task
        rewards = load_rewards(RewardSection(functions=("rewards.py:f",), timeout=0.1, isolation="thread"), Path("."))
        one = Rollout(Task("t", "q", ()))
        asyncio.run(rewards.score([one], ["a"]))
        print(one.status.value)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("timed_out", "")


def test_what_functions_log() -> None:
    def f(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("length", [len(c) for c in completions])
        log_extra("said", list(completions))
        log_metric("loudness", 3.0)
        return [1.0] * len(completions)

    def g(completions: list[str], log_extra: Any = None, **_: Any) -> list[float]:
        log_extra("length", [0.5] * len(completions))
        return [1.0] * len(completions)

    two = [rollout(), rollout()]
    rewards = reward_set(f, g)
    score(rewards, two, ["aa", "b"])
    assert two[0].metrics == {"length": 2.0, "g/length": 0.5}
    assert two[1].notes == {"said": "b"}
    metrics = rewards.metrics(two)
    assert metrics["logged/loudness"] == 3.0
    assert metrics["logged/length"] == 1.5
    assert "logged/loudness" not in rewards.metrics(two)
    score(rewards, [rollout()])
    with rewards.apart():
        score(rewards, [rollout()])
    assert list(rewards.metrics([]).items()) == [("logged/loudness", 3.0)]


def test_log_extra_of_the_wrong_length_is_the_functions_error() -> None:
    def f(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("x", [1])
        return [1.0, 1.0]

    two = [rollout(), rollout()]
    score(reward_set(f), two)
    assert "1 values for 2 completions" in str(two[0].error)


def test_columns_the_data_lacks_are_refused_before_training() -> None:
    def f(completions: list[str], solution: list[str], other: object = None) -> list[float]:
        return []

    rewards = reward_set(f)
    with pytest.raises(ConfigError, match=r"'solution'.*Did you mean 'solutions'"):
        rewards.check_tasks([rollout(solutions="x").task])
    rewards.check_tasks([rollout(solution="x").task, rollout().task])

    def misspelt(completions: list[str], answers: list[str]) -> list[float]:
        return []

    for column, said in (("answer", "Did you mean 'answer'"), ("gold", "completions")):
        with pytest.raises(ConfigError, match=f"'answers'.*{said}"):
            reward_set(misspelt).check_tasks([rollout(**{column: "x"}).task])


def test_answers_the_builtins_cannot_use_are_refused_by_task() -> None:
    def problem(gold: Any) -> str | None:
        return None if gold == "4" else f"is {gold}"

    def f(completions: list[str], answer: list[str]) -> list[float]:
        return []

    function = RewardFunction("f", "f", f, frozenset({"answer"}), True, check_gold=problem)
    tasks = [rollout("one", answer="4").task, rollout("two", answer="5").task]
    with pytest.raises(DataError, match="task two: the column 'answer' is 5"):
        with_functions([function], [1.0]).check_tasks(tasks)
    mixture = [rollout("one", answer="4").task, rollout("two").task]
    with pytest.raises(DataError, match="task two"):
        with_functions([function], [1.0]).check_tasks(mixture)

    def h(completions: list[str]) -> list[float]:
        return []

    other = RewardFunction("h", "h", h)
    with_functions([function, other], [1.0, 1.0]).check_tasks(mixture)
    played = [mixture[0], replace(mixture[1], environment="guess")]
    with_functions([function], [1.0]).check_tasks(played)
    with pytest.raises(DataError, match="task two"):
        with_functions([function], [1.0]).check_tasks(
            [mixture[0], replace(mixture[1], environment="tools")]
        )


def test_a_call_that_another_one_blocked_fails_by_a_deadline(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "ANSWER_SECONDS", 0.0)
    blocked = threading.Event()
    released = threading.Event()

    async def judged(completions: list[str]) -> list[float]:
        if completions[0] == "blocks":
            blocked.set()
            released.wait()
        return [1.0] * len(completions)

    rewards = reward_set(judged, timeout=OVERRUN)
    blocking = rollout()
    innocent = rollout()

    async def both() -> None:
        first = asyncio.create_task(rewards.score([blocking], ["blocks"]))
        await until(blocked.is_set)
        rewards._timeout = 60.0
        second = asyncio.create_task(rewards.score([innocent], ["fine"]))
        for _ in range(10):  # it waits for the loop that is blocked
            await asyncio.sleep(0)
        begun.append(1)
        await first
        released.set()
        await second

    asyncio.run(both())
    rewards.close()
    assert blocking.status is Status.TIMED_OUT and "blocks its event loop" in str(blocking.error)
    assert innocent.status is Status.TIMED_OUT and "another call blocked its event loop" in str(
        innocent.error
    )


def failed(status: Status, error: str = "why") -> Rollout:
    made = rollout()
    made.fail(status, error)
    return made


def test_gate_stops_above_the_share_only() -> None:
    good = [rollout() for _ in range(9)]
    check_failed([], 0.1)
    check_failed(good, 0.1)
    check_failed([*good, failed(Status.REWARD_FAILED)], 0.1)
    with pytest.raises(RewardError) as error:
        check_failed(
            [*good, failed(Status.REWARD_FAILED, "Traceback: boom"), failed(Status.TIMED_OUT)], 0.1
        )
    message = str(error.value)
    assert "2 of 11 rollouts failed (1 reward_failed, 1 timed_out): 18%" in message
    assert "Traceback: boom" in message


def test_gate_shows_a_rollout_that_was_tried() -> None:
    tried = failed(Status.TIMED_OUT, "it ran")
    pointless = failed(Status.NOT_TRIED, "it did not")
    for rollouts in ([pointless, tried, pointless], [pointless]):
        with pytest.raises(RewardError) as error:
            check_failed(rollouts, 0.0)
        assert str(error.value).endswith(str((tried if tried in rollouts else pointless).error))


def test_metrics_by_hand() -> None:
    rewards = [(1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    rollouts = [rollout() for _ in rewards] + [failed(Status.TIMED_OUT)]
    for r, (total, answered, correct) in zip(rollouts, rewards, strict=False):
        r.reward = total
        r.rewards = {"f": total, "g": None}
        r.metrics = {"answered": answered, "correct": correct}
    assert reward_metrics(rollouts) == pytest.approx(
        {
            "rollouts/failed": 0.25,
            "rollouts/timed_out": 0.25,
            "reward": 1 / 3,
            "reward/std": (2 / 9) ** 0.5,
            "reward/f/mean": 1 / 3,
            "reward/f/std": (2 / 9) ** 0.5,
            "reward/f/applied": 1.0,
            "reward/g/applied": 0.0,
            "answered": 2 / 3,
            "correct": 1 / 3,
            "correct_of_answered": 0.5,
        }
    )
    assert reward_metrics([]) == {}


def test_the_share_of_right_answers_is_of_rollouts_that_log_both() -> None:
    """One right answer of two: a rollout that is right without an answer is not among them."""
    rollouts = [rollout() for _ in range(4)]
    logged = [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, None)]
    for r, (answered, correct) in zip(rollouts, logged, strict=True):
        r.reward = 0.0
        r.metrics = {"answered": answered} | ({} if correct is None else {"correct": correct})
    assert reward_metrics(rollouts)["correct_of_answered"] == 0.5


def test_whatever_a_reward_logs_is_kept_as_plain_data() -> None:
    logged = [{3, 1}, Fraction(1, 2), np.arange(2), object(), "a\udc80"]

    def f(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("seen", logged)
        for value in (1e308, 1e308, float("inf"), float("-inf")):
            log_metric("odd", value)
        return [0.0] * len(completions)

    rollouts = [rollout() for _ in logged]
    rewards = reward_set(f)
    score(rewards, rollouts)
    assert [r.status for r in rollouts] == [Status.OK] * 5
    seen = [r.metrics.get("seen", r.notes.get("seen")) for r in rollouts]
    assert (
        seen[:3] == [[1, 3], 0.5, [0, 1]]
        and str(seen[3]).startswith("<object")
        and seen[4] == "a\\udc80"
    )
    assert "logged/odd" in rewards.metrics(rollouts)


@pytest.mark.parametrize("value", [1e16, -1e300, 1.7e308])
def test_huge_rewards_are_refused(value: float) -> None:
    def f(completions: list[str]) -> list[float]:
        return [value, 1e15]

    two = [rollout(), rollout()]
    score(reward_set(f), two)
    assert [r.status for r in two] == [Status.REWARD_FAILED, Status.OK] and "1e+15" in str(
        two[0].error
    )
    heavy = [rollout(), rollout()]
    score(reward_set(f, weights=[1e300]), heavy)
    assert [r.status for r in heavy] == [Status.REWARD_FAILED] * 2


def test_trainer_state_has_what_transformers_has(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 0.5}\n')
    state = TrainerState(global_step=1, best_metric=0.25, metrics_file=file)
    assert state.log_history == [{"step": 1, "loss": 0.5}] and state.is_world_process_zero
    file.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    assert [record["step"] for record in state.log_history] == [1, 2]
    assert TrainerState().log_history == [] and state.best_metric == 0.25
    with pytest.raises(AttributeError, match="global_step"):
        _ = state.global_stepp
    with pytest.raises(AttributeError, match="log_history"):
        _ = state.total_flos


@pytest.mark.parametrize(
    ("argument", "instead"),
    [("completion", "completions"), ("prompt", "prompts"), ("queries", "prompts")],
)
def test_arguments_of_other_frameworks_are_named(argument: str, instead: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def f({argument}): return [0.0]", scope)
    with pytest.raises(ConfigError, match=rf"\b{instead}\b"):
        reward_set(scope["f"]).check_tasks([Task("t", "q", (1,), {"answer": "4"})])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_function_of_verl_runs_as_it_is(asynchronous: bool, nested: bool) -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> Any:
        assert data_source == "gsm8k" and extra_info == {"split": "train"}
        right = solution_str == ground_truth
        return {"score": float(right), "acc": right, "pred": solution_str} if right else 0.0

    async def later(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> Any:
        return compute_score(data_source, solution_str, ground_truth, extra_info)

    made = user_reward("score", "verl.py:score", later if asynchronous else compute_score)
    gold: Any = (
        {"reward_model": {"style": "rule", "ground_truth": "4"}}
        if nested
        else {"ground_truth": "4"}
    )
    two = [rollout(data_source="gsm8k", extra_info={"split": "train"}, **gold) for _ in range(2)]
    rewards = with_functions([made], [1.0])
    rewards.check_tasks([r.task for r in two])
    with pytest.raises(ConfigError, match="ground_truth"):
        rewards.check_tasks([Task("t", "q", (1,), {"data_source": "x"})])
    score(rewards, two, ["4", "5"])
    assert [r.reward for r in two] == [1.0, 0.0], two[0].error
    assert two[0].metrics == {"acc": 1.0} and two[0].notes == {"pred": "4"}


def test_the_reward_of_the_readme_reads_the_last_number() -> None:
    scope: dict[str, Any] = {}
    (code,) = [b.text for b in blocks_of(ROOT / "README.md") if "def right_number" in b.text]
    exec(code, scope)
    cases = [
        ("The answer is 25", "5", 0.0),
        ("391.", "391", 1.0),
        ("so 1,391", "1391", 1.0),
        ("none", "5", 0.0),
    ]
    texts, golds, expected = zip(*cases, strict=True)
    assert scope["right_number"](completions=list(texts), answer=list(golds)) == list(expected)


async def test_the_default_dtype_is_kept_when_calls_overlap() -> None:
    async def call(wait: asyncio.Event, done: asyncio.Event) -> None:
        with kept_default_dtype():
            torch.set_default_dtype(torch.float64)
            done.set()
            await wait.wait()

    first, second, started, again = (asyncio.Event() for _ in range(4))
    calls = [asyncio.create_task(call(first, started))]
    await started.wait()
    calls.append(asyncio.create_task(call(second, again)))
    await again.wait()
    first.set()
    await calls[0]
    second.set()
    await calls[1]
    assert torch.get_default_dtype() == torch.float32


async def test_what_is_logged_beside_an_evaluation_stays_in_the_metrics() -> None:
    def logs(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("seen", float(len(completions[0])))
        return [0.0 for _ in completions]

    rewards = reward_set(logs)
    begin = asyncio.Event()
    ended = asyncio.Event()

    async def scored(text: str) -> None:
        await rewards.score([Rollout(Task("t", "p", ()))], [text])

    async def training() -> None:
        await begin.wait()
        await scored("four")
        ended.set()

    task = asyncio.create_task(training())
    with rewards.apart():
        await scored("a")
        begin.set()
        await ended.wait()
    await task
    with suppress(KeyError), rewards.apart():
        raise KeyError("an evaluation that fails")
    await scored("as eight")
    assert rewards.metrics([])["logged/seen"] == 6.0
    rewards.close()
