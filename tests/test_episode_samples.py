"""From episodes to samples: a sample per record, a turn's reward at its place, nothing learned twice."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from tunesmith.algorithms.aggregation import token_weights
from tunesmith.algorithms.presets import resolve_algorithm
from tunesmith.config.schema import AlgorithmSection
from tunesmith.loop.experience import make_experience, with_written, written
from tunesmith.types import Completion, Record, Rollout, RolloutGroup, Sample, Task


def record(*turns: tuple[int, float], prompt: int = 2) -> Record:
    """Turns of so many tokens, each with its reward, with one token between them."""
    made = Record()
    made.observe([3] * prompt)
    for number, (length, reward) in enumerate(turns):
        if number:
            made.observe([4])
        made.act(Completion([5] * length, [-0.5] * length, [1] * length, "stop"))
        made.pay(reward)
    return made


def group(*rollouts: list[Record], last: float = 0.0) -> RolloutGroup:
    task = Task("t", "p", (3, 3))
    return RolloutGroup(
        task,
        [Rollout(task, records, sum(t.reward for r in records for t in r.turns) + last) for records in rollouts],
    )


def samples_of(groups: list[RolloutGroup], **settings: Any) -> list[Sample]:
    section, _ = resolve_algorithm(AlgorithmSection(**settings), max_new_tokens=8)
    return make_experience(groups, section, cast("Any", None), kl_coef=0.0, max_new_tokens=8, seed=0)


def test_each_record_is_a_sample_with_its_rollouts_advantage() -> None:
    forked = [record((2, 0.0)), record((1, 1.0), prompt=5)]
    samples = samples_of([group(forked, [record((3, 0.0))])], name="grpo")
    assert [s.token_ids for s in samples] == [[3, 3, 5, 5], [3, 3, 3, 3, 3, 5], [3, 3, 5, 5, 5]]
    assert [s.loss_mask.count(True) for s in samples] == [2, 1, 3]
    assert len({s.group for s in samples}) == 1
    assert [s.rollout for s in samples] == [0, 0, 1]
    assert [w[-1] for w in token_weights(samples, "seq_mean_token_mean")] == pytest.approx([1 / 6, 1 / 6, 1 / 6])
    high, low = (1 - 0.5) / (0.5**0.5 + 1e-6), (0 - 0.5) / (0.5**0.5 + 1e-6)
    assert samples[0].columns["advantages"] == pytest.approx([0, 0, high, high])
    assert samples[1].columns["advantages"] == pytest.approx([0, 0, 0, 0, 0, high])
    assert samples[2].columns["advantages"] == pytest.approx([0, 0, low, low, low])


def test_a_turns_reward_counts_from_the_token_where_it_was_paid() -> None:
    """Returns to go with γ = 0.5 of 1 at the second token and 4 (of the end) at the last, over two records."""
    rollout = [record((2, 1.0)), record((1, 0.0), prompt=4)]
    other = [record((1, 0.0))]
    made = group(rollout, other)
    made.rollouts[0].reward = 1.0 + 4.0
    samples = samples_of([made], name="reinforce_pp", gamma=0.5, kl_coef=0.0)
    returns = np.array([0.5 + 1.0, 1.0 + 2.0, 4.0, 0.0])
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    assert samples[0].columns["advantages"] == pytest.approx([0, 0, *expected[:2]])
    assert samples[1].columns["advantages"] == pytest.approx([0, 0, 0, 0, expected[2]])
    assert samples[2].columns["advantages"] == pytest.approx([0, 0, expected[3]])


def test_rewards_of_turns_without_tokens_are_not_lost() -> None:
    made = record((2, 1.0))
    made.act(Completion([], [], [], "abort"))
    made.pay(0.5)
    assert made.token_rewards == [0.0, 1.5]


def test_columns_are_joined_by_rollout_and_cut_again() -> None:
    samples = [Sample([1, 2, 3], mask, {"x": column}) for mask, column in (
        ([False, True, True], [0.0, 1.0, 2.0]), ([False, False, True], [0.0, 0.0, 3.0]), ([False] * 3, [0.0] * 3),
    )]  # fmt: skip
    joined = written(samples, [0, 0, 1], "x")
    assert [j.tolist() for j in joined] == [[1.0, 2.0, 3.0], []]
    again = with_written(samples, joined, "y")
    assert [s.columns["y"] for s in again] == [s.columns["x"] for s in samples]
    assert with_written([], [], "y") == []


def test_what_the_policy_wrote_cannot_be_cut_off() -> None:
    made = record((2, 0.0))
    made.observe([9, 9])
    made.cut(4)
    assert made.token_ids == [3, 3, 5, 5] and made.sampled == [False, False, True, True]
    with pytest.raises(AssertionError):
        made.cut(3)
