"""pass@k against enumeration, greedy metrics, and what failed rollouts count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_engine import FakeEngine, numbers
from tunesmith.config.schema import EvalSection
from tunesmith.errors import EngineError
from tunesmith.learn.environments.base import SingleTurn
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.evaluate import EvaluationPlan, _greedy_metrics, evaluate, pass_at_k, passes
from tunesmith.types import Completion, Rollout, RolloutGroup, Sampling, Task


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the one that passes
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 of the 10 triples holds none
    assert pass_at_k(4, 1, 4) == 1.0


@given(
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_subsets_with_one_that_passes(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    subsets = list(combinations([i < correct for i in range(n)], k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


class Scorer:
    """What each task's rollouts get, in turn."""

    def __init__(self, rewards: dict[str, list[float]], answered: bool = False) -> None:
        self.rewards = rewards
        self.answered = answered
        self.samplings = 0

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:  # noqa: ARG002
        values = self.rewards[rollouts[0].task.id]
        for place, rollout in enumerate(rollouts):
            rollout.reward = values[0 if len(rollouts) == 1 else place]
            rollout.rewards = {
                "right": rollout.reward,
                "style": None if rollout.task.id == "a" else 0.5,
            }
            if self.answered:
                rollout.metrics["answered"] = float(rollout.task.id == "a")


class Watching(FakeEngine):
    def __init__(self, failing: int | None = None) -> None:
        super().__init__(lambda p, s: [5] * (p[-1] - 1) + [2])  # noqa: ARG005
        self.asked: list[Sampling] = []
        self.failing = failing

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        if prompt_ids[-1] == self.failing:
            raise EngineError("lost")
        return await super().generate(prompt_ids, sampling)


TASKS = [Task("a", "a", (3, 4)), Task("b", "b", (3, 6))]


def measured(
    engine: FakeEngine, scorer: Any, tasks: list[Task] = TASKS, **changed: Any
) -> tuple[dict[str, float], list[RolloutGroup]]:
    settings: dict[str, Any] = {
        "tasks": tasks,
        "sampling": Sampling(max_new_tokens=9, temperature=0.8, top_p=0.9),
        "weights": {"right": 1.0, "style": 0.0},
        "seed": 3,
    }
    section = EvalSection(**{"samples": 1, "temperature": 0.6, "pass_at": (1, 2), **changed})
    made = Collector(engine.generate, scorer, {"single_turn": SingleTurn()}, numbers, 60.0)
    plan = EvaluationPlan(**settings, section=section, pass_at=section.pass_at)
    return asyncio.run(evaluate(made, plan))


def test_greedy_metrics() -> None:
    engine = Watching()
    metrics, groups = measured(engine, Scorer({"a": [1.0], "b": [0.5]}, answered=True))
    assert metrics == {
        "eval/accuracy": 0.5,
        "eval/length": 5.0,
        "eval/failed": 0.0,
        "eval/reward": 0.75,
        "eval/reward/right": 0.75,
        "eval/reward/style": 0.5,
        "eval/answered": 0.5,
    }
    assert [s.temperature for s in engine.asked] == [0.0, 0.0]
    assert [g.task.id for g in groups] == ["a", "b"]


def test_a_rollout_passes_when_every_reward_that_applies_to_it_is_full() -> None:
    weights = {"right": 0.7, "format": 0.2, "long": -1.0}
    cases: list[tuple[dict[str, float | None], float, bool]] = [
        ({"right": 1.0, "format": 1.0, "long": 0.0}, 0.2 + 0.7, True),
        ({"right": 1.0, "format": 1.0, "long": 0.1}, 0.8, False),
        ({"right": 1.0, "format": None}, 0.7, True),
        ({"right": None, "format": 1.0, "environment": 1.0}, 1.2, True),
        ({"right": None, "format": 1.0, "environment": 0.0}, 0.2, False),
        ({}, 1.0, True),
        ({}, 0.9, False),
    ]
    for rewards, total, full in cases:
        assert passes(Rollout(TASKS[0], reward=total, rewards=rewards), weights) is full, rewards
    assert not passes(Rollout(TASKS[0]), weights), "no reward at all"


def test_pass_at_k_draws_samples_beside_the_greedy_ones() -> None:
    engine = Watching()
    metrics, groups = measured(
        engine, Scorer({"a": [0.0, 1.0, 0.0], "b": [0.0] * 3}), samples=3, pass_at=(1, 2, 3)
    )
    assert metrics["eval/accuracy"] == 0.0
    assert metrics["eval/pass@1"] == pytest.approx((1 / 3 + 0) / 2)
    assert metrics["eval/pass@2"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["eval/pass@3"] == 0.5
    assert sorted(s.temperature for s in engine.asked) == [0.0] * 2 + [0.6] * 6
    assert all(len(g.rollouts) == 1 for g in groups), "the groups are the greedy ones"


def test_failed_rollouts_count_as_not_passed_and_are_told() -> None:
    metrics, _ = measured(Watching(failing=6), Scorer({"a": [1.0, 1.0]}), samples=2)
    assert metrics["eval/failed"] == 0.5
    assert metrics["eval/accuracy"] == 0.5, "of all tasks, not of those that worked"
    assert metrics["eval/reward"] == 1.0, "of those that have one"
    assert metrics["eval/pass@1"] == 0.5
    metrics, _ = measured(Watching(failing=6), Scorer({}), tasks=TASKS[1:])
    assert (
        metrics["eval/failed"] == 1.0
        and metrics["eval/accuracy"] == 0.0
        and "eval/reward" not in metrics
    )


def test_failed_samples_are_told_too() -> None:
    class LosingSamples(Watching):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            self.failing = 6 if sampling.temperature else None
            return await super().generate(prompt_ids, sampling)

    metrics, groups = measured(LosingSamples(), Scorer({"a": [1.0] * 3, "b": [1.0] * 3}), samples=3)
    assert metrics["eval/accuracy"] == 1.0 and metrics["eval/pass@1"] == 0.5
    assert all(group.usable for group in groups)
    assert metrics["eval/failed"] == pytest.approx(3 / 8)


def test_a_reward_that_the_first_rollout_lacks_is_averaged_too() -> None:
    rollouts = [Rollout(task) for task in TASKS]
    for rollout, rewards in zip(
        rollouts, ({"right": 1.0}, {"right": 0.0, "environment": 2.0}), strict=True
    ):
        rollout.reward = sum(rewards.values())
        rollout.rewards = dict(rewards)
    groups = [RolloutGroup(r.task, [r]) for r in rollouts]
    for ordered in (groups, groups[::-1]):
        assert _greedy_metrics(ordered, {})["eval/reward/environment"] == 2.0
