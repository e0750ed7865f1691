from __future__ import annotations

import pytest

from tunesmith.algorithms.filtering import filter_groups, group_score, rollout_score
from tunesmith.errors import ConfigError
from tunesmith.types import Rollout, RolloutGroup, Status, Task

TASK = Task("t", "p", (1,))


def rollout(reward: float | None, **rewards: float | None) -> Rollout:
    return Rollout(TASK, reward=reward, rewards=rewards)


def group(*scores: float) -> RolloutGroup:
    return RolloutGroup(TASK, [rollout(s, exact=s) for s in scores])


@pytest.mark.parametrize(
    ("score", "low", "high", "expected"),
    [
        (0.0, 0.0, 1.0, False),
        (1.0, 0.0, 1.0, False),
        (1e-9, 0.0, 1.0, True),
        (0.5, 0.0, 1.0, True),
        (0.2, 0.2, 0.8, False),
        (0.8, 0.2, 0.8, False),
    ],
)
def test_the_bounds_are_strict(score: float, low: float, high: float, expected: bool) -> None:
    kept, rejected = filter_groups([group(score)], low, high)
    assert (len(kept), len(rejected)) == (expected, not expected)


def test_groups_are_split_in_order() -> None:
    groups = [group(0, 0), group(0, 1), group(1, 1), group(1, 0, 0)]
    assert filter_groups(groups) == ([groups[1], groups[3]], [groups[0], groups[2]])
    assert filter_groups(groups, 0.4, 0.9)[0] == [groups[1]]
    assert filter_groups([]) == ([], [])


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
    assert group_score(mixed) == 1.0
    assert group_score(RolloutGroup(TASK, [broken])) is None
    assert filter_groups([RolloutGroup(TASK, [broken])])[0] == []


@pytest.mark.parametrize("score", [-0.5, 1.5, 100.0])
def test_a_score_outside_zero_to_one_is_refused_by_name(score: float) -> None:
    with pytest.raises(ConfigError, match=r"'exact' gave .*dynamic_filter=false"):
        filter_groups([group(0.0, score)])
