"""From episodes to samples: a sample per record, a turn's reward at its place, nothing learned
twice."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from tests.support.algorithms import algorithm
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.data.batch import Batch
from tunesmith.run.loop.experience import by_rollout, make_experience
from tunesmith.run.loop.learner import lost_tokens
from tunesmith.run.loop.teacher import ALIGNED
from tunesmith.types import Completion, Record, Rollout, RolloutGroup, Task


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
        [
            Rollout(task, records, sum(t.reward for r in records for t in r.turns) + last)
            for records in rollouts
        ],
    )


def batch_of(groups: list[RolloutGroup], **settings: Any) -> Batch:
    return make_experience(
        groups, algorithm(**settings), cast("Any", None), kl_coef=0.0, max_new_tokens=8, seed=0
    )


def test_each_record_is_a_sample_with_its_rollouts_advantage() -> None:
    forked = [record((2, 0.0)), record((1, 1.0), prompt=5)]
    batch = batch_of([group(forked, [record((3, 0.0))])], name="grpo")
    tokens = np.split(batch.token_ids, batch.offsets[1:-1])
    assert [t.tolist() for t in tokens] == [[3, 3, 5, 5], [3, 3, 3, 3, 3, 5], [3, 3, 5, 5, 5]]
    assert batch.predicted.tolist() == [2, 3, 9, 12, 13, 14]
    assert batch.group.tolist() == [0, 0, 0] and batch.rollout.tolist() == [0, 0, 1]
    weigh(batch, "seq_mean_token_mean")
    assert batch.columns["weight"] == pytest.approx([1 / 6] * 6)
    high = (1 - 0.5) / (0.5**0.5 + 1e-6)
    low = (0 - 0.5) / (0.5**0.5 + 1e-6)
    assert batch.columns["advantages"] == pytest.approx([high] * 3 + [low] * 3)


def test_a_turns_reward_counts_from_the_token_where_it_was_paid() -> None:
    """Returns to go with γ = 0.5 of 1 at the second token and 4 (of the end) at the last, over two
    records."""
    rollout = [record((2, 1.0)), record((1, 0.0), prompt=4)]
    other = [record((1, 0.0))]
    made = group(rollout, other)
    made.rollouts[0].reward = 1.0 + 4.0
    batch = batch_of([made], name="reinforce_pp", advantage__gamma=0.5, kl="none")
    returns = np.array([0.5 + 1.0, 1.0 + 2.0, 4.0, 0.0])
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    assert batch.columns["advantages"] == pytest.approx(expected)


def test_rewards_of_turns_without_tokens_are_not_lost() -> None:
    made = record((2, 1.0))
    made.act(Completion([], [], [], "abort"))
    made.pay(0.5)
    assert made.token_rewards == [0.0, 1.5]


def test_tokens_that_are_lost_before_the_update_are_counted() -> None:
    """The sampler's value of one token, and the reference's of another; not what a teacher with
    another tokenizer leaves out."""
    made = group([record((3, 0.0))], [record((2, 1.0))])
    made.rollouts[0].records[0].logprobs[3] = math.nan
    batch = batch_of([made], name="grpo")
    assert lost_tokens(batch) == 1
    batch.add("ref_logprobs", [-1.0, -1.0, -1.0, -1.0, math.nan])
    assert lost_tokens(batch) == 2
    batch.add(ALIGNED, [1.0] * 4 + [0.0])
    assert lost_tokens(batch) == 1


def test_a_column_is_split_by_rollout() -> None:
    batch = batch_of([group([record((2, 0.0)), record((1, 1.0))], [record((3, 0.0))])], name="grpo")
    assert [own.tolist() for own in by_rollout(batch, np.arange(6.0))] == [[0, 1, 2], [3, 4, 5]]


def test_what_the_policy_wrote_cannot_be_cut_off() -> None:
    made = record((2, 0.0))
    made.observe([9, 9])
    made.cut(4)
    assert made.token_ids == [3, 3, 5, 5] and made.sampled == [False, False, True, True]
    with pytest.raises(AssertionError):
        made.cut(3)
