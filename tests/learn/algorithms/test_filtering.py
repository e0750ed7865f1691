from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.config.families import DynamicFilter
from tunesmith.learn.algorithms.advantages import GRPO
from tunesmith.learn.algorithms.filtering import rollout_score, split
from tunesmith.learn.algorithms.outcomes import Outcome
from tunesmith.types import Completion, Rollout, RolloutGroup, Status, Task

TASK = Task("t", "p", (1,))


def rollout(reward: float | None, **rewards: float | None) -> Rollout:
    made = Rollout(TASK, reward=reward, rewards=rewards)
    made.act(Completion([5], [-1.0], [0], "stop"))
    return made


def group(*scores: float) -> RolloutGroup:
    return RolloutGroup(TASK, [rollout(s, exact=s) for s in scores])


@pytest.mark.parametrize(
    ("scores", "low", "high", "expected"),
    [
        ((0.0, 0.0), None, None, False),
        ((1.0, 1.0, 1.0), None, None, False),
        ((0.5, 0.5), None, None, False),
        ((0.5,), None, None, False),
        ((-1.0, -1.0), None, None, False),
        ((-1.0, 1.0), None, None, True),
        ((0.0, 1e-9), None, None, True),
        ((30.0, 40.0), None, None, True),
        ((0.1, 0.3), 0.2, 0.8, False),
        ((0.1, 0.31), 0.2, 0.8, True),
        ((0.7, 0.9), 0.2, 0.8, False),
        ((0.7, 0.9), 0.2, None, True),
        ((0.5, 0.5), 0.2, 0.8, False),
        ((-1.0, 1.0), -1.0, 0.0, False),
    ],
)
def test_a_group_stays_when_its_scores_differ_and_their_mean_is_strictly_between_the_bounds(
    scores: tuple[float, ...], low: float | None, high: float | None, expected: bool
) -> None:
    kept, rejected = split(DynamicFilter(low=low, high=high), [group(*scores)])
    assert (len(kept), len(rejected)) == (expected, not expected)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=6))
def test_without_bounds_exactly_the_groups_with_an_advantage_stay(scores: list[float]) -> None:
    made = group(*scores)
    advantages = GRPO()([Outcome(0, score, 1) for score in scores]).advantages
    assert bool(split(DynamicFilter(), [made])[0]) == any(a.any() for a in advantages)


def test_groups_are_split_in_order() -> None:
    groups = [group(0, 0), group(0, 1), group(1, 1), group(1, 0, 0)]
    assert split(DynamicFilter(), groups) == ([groups[1], groups[3]], [groups[0], groups[2]])
    assert split(DynamicFilter(low=0.4, high=0.9), groups)[0] == [groups[1]]
    assert split(DynamicFilter(), []) == ([], [])


def test_the_score_is_the_weighted_mean_of_raw_rewards() -> None:
    assert rollout_score(rollout(-3.0, a=1.0, b=0.0), {"a": 3.0}) == 0.75
    assert rollout_score(rollout(0.5, a=1.0, b=None)) == 1.0
    assert rollout_score(rollout(None, a=None)) is None
    assert rollout_score(rollout(1.0, a=1.0), {"a": 0.0}) is None
    assert rollout_score(rollout(1.0, a=1.0, penalty=40.0), {"penalty": -0.5}) == 1.0


def test_failed_rollouts_have_no_score() -> None:
    broken = rollout(0.0, exact=0.0)
    broken.fail(Status.REWARD_FAILED, "raised")
    mixed = RolloutGroup(TASK, [broken, rollout(1.0, exact=1.0)])
    assert split(DynamicFilter(), [mixed])[0] == [], "of two only one has a score"
    assert split(DynamicFilter(), [RolloutGroup(TASK, [broken])])[0] == []
