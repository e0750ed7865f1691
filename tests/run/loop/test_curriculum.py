"""Tasks that taught nothing rest for the stated epochs, are tried again after them, and stay so
across a resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tunesmith.learn.data.loader import Loader
from tunesmith.run.loop.curriculum import Curriculum
from tunesmith.types import Rollout, RolloutGroup, Task

TASKS = [Task(name, name, (5,)) for name in "abcd"]


def curriculum(rest_epochs: int) -> Curriculum:
    return Curriculum(Loader(TASKS, shuffle=False), rest_epochs)


def names(tasks: list[Task]) -> str:
    return "".join(task.id for task in tasks)


def rest(of: Curriculum, which: str) -> None:
    of.rest([RolloutGroup(task, []) for task in TASKS if task.id in which])


def test_a_task_rests_for_the_stated_epochs() -> None:
    tasks = curriculum(2)
    assert names(tasks.next_batch(3)) == "abc"
    rest(tasks, "b")  # in epoch 0: left out in epochs 1 and 2
    assert tasks.resting == 1
    assert names(tasks.next_batch(1)) == "d"
    assert names(tasks.next_batch(6)) == "acdacd"
    assert names(tasks.next_batch(4)) == "abcd"
    assert tasks.resting == 0


def test_it_rests_as_long_where_its_group_ends_with_the_pass() -> None:
    tasks = curriculum(1)
    assert names(tasks.next_batch(4)) == "abcd"
    rest(tasks, "bd")  # in epoch 0, though the next draw is of epoch 1
    assert names(tasks.next_batch(6)) == "acabcd"


def test_without_rest_nothing_changes() -> None:
    tasks = curriculum(0)
    rest(tasks, "abcd")
    assert names(tasks.next_batch(8)) == "abcdabcd"


def test_where_all_rest_none_does() -> None:
    tasks = curriculum(5)
    rest(tasks, "abcd")
    assert len(tasks.next_batch(3)) == 3


def test_who_rests_is_saved() -> None:
    tasks = curriculum(1)
    again = curriculum(1)
    tasks.settle(tasks.next_batch(4))
    rest(tasks, "ac")
    again.load_state_dict(json.loads(json.dumps(tasks.state_dict())))
    assert names(tasks.next_batch(6)) == names(again.next_batch(6))


def test_where_the_data_lies_now_does_not_matter() -> None:
    tasks = curriculum(1)
    tasks.settle(tasks.next_batch(3))
    rest(tasks, "ac")
    tasks.next_batch(2)
    moved = Curriculum(
        Loader([Task(f"moved/{task.id}", task.id, (5,)) for task in TASKS], shuffle=False), 1
    )
    # What is read is in the fingerprint of ``data.reading``; of these items their names are too.
    moved.load_state_dict(
        json.loads(json.dumps({**tasks.state_dict(), "fingerprint": moved.loader.fingerprint}))
    )
    assert names(moved.next_batch(4)) == "moved/dmoved/bmoved/dmoved/a"


def test_what_was_drawn_and_not_settled_comes_first_again() -> None:
    tasks = curriculum(1)
    again = curriculum(1)
    third = curriculum(1)
    drawn = tasks.next_batch(6)
    tasks.settle(drawn[:2])
    again.load_state_dict(json.loads(json.dumps(tasks.state_dict())))
    assert names(again.next_batch(2)) == names(drawn[2:4])
    third.load_state_dict(again.state_dict())
    assert sorted(names(third.next_batch(4))) == sorted(names(drawn[2:6]))
    assert names(third.next_batch(3)) == names(tasks.next_batch(3))


def played(task: Task, right: int, wrong: int) -> RolloutGroup:
    rewards = [1.0] * right + [0.0] * wrong
    return RolloutGroup(task, [Rollout(task, reward=reward) for reward in rewards])


def by_rate() -> Curriculum:
    return Curriculum(Loader(TASKS, seed=3), passes=lambda rollout: rollout.reward == 1.0)


def test_a_task_is_taken_by_its_success_rate() -> None:
    """Of 8 rollouts, 0, 4 and 8 right: p = 1/10, 5/10 and 9/10. Played again, half of that counts:
    p = (2 + 8 + 1) / (4 + 8 + 2)."""
    tasks = by_rate()
    tasks.learn([played(TASKS[0], 0, 8), played(TASKS[1], 4, 4), played(TASKS[2], 8, 0)])
    assert [tasks.chance(task) for task in TASKS] == pytest.approx([0.36, 1.0, 0.36, 1.0])
    tasks.learn([played(TASKS[1], 8, 0)])
    assert tasks.chance(TASKS[1]) == pytest.approx(4 * 11 / 14 * 3 / 14)
    counts = Counter(names(tasks.next_batch(3000)))
    assert counts["a"] / counts["d"] == pytest.approx(0.36, abs=0.04)
    assert counts["b"] / counts["d"] == pytest.approx(0.673, abs=0.06)


def test_what_comes_up_by_success_rate_is_the_same_after_a_resume() -> None:
    tasks = by_rate()
    again = by_rate()
    tasks.learn([played(TASKS[0], 0, 8), played(TASKS[2], 8, 0)])
    tasks.settle(tasks.next_batch(7))
    again.load_state_dict(json.loads(json.dumps(tasks.state_dict())))
    assert names(tasks.next_batch(40)) == names(again.next_batch(40))
    assert tasks.state_dict() == again.state_dict()
