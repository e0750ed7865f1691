"""Rollouts that fail are data, everything is in order, and rewards are computed while others still
run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.clocks import passing
from tests.support.fake_engine import FakeEngine, numbers
from tunesmith.errors import EngineError, RewardError, UserError
from tunesmith.learn.environments.base import Environment, Generate, SingleTurn
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.types import Completion, Rollout, RolloutGroup, Sampling, Status, Task

SAMPLING = Sampling(max_new_tokens=6)


class Counting(FakeEngine):
    """Counts the requests in flight."""

    running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.running += 1
        try:
            return await super().generate(prompt_ids, sampling)
        finally:
            self.running -= 1


class Scorer:
    """Rewards the length; remembers what it was called with, and how much had been sampled by
    then."""

    def __init__(self, engine: Counting | None = None) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.running: list[int] = []
        self.engine = engine

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        self.calls.append((rollouts[0].task.id, list(texts)))
        if self.engine is not None:
            self.running.append(self.engine.running)
        for rollout in rollouts:
            rollout.reward = float(rollout.num_sampled)


def tasks(count: int, environment: str = "single_turn") -> list[Task]:
    return [Task(f"t{i}", f"prompt {i}", (3, 10 + i), {}, environment) for i in range(count)]


def collector(
    engine: Any = None,
    scorer: Any = None,
    environments: dict[str, Environment] | None = None,
    timeout: float = 60.0,
) -> Collector:
    return Collector(
        (engine or FakeEngine()).generate,
        scorer or Scorer(),
        environments or {"single_turn": SingleTurn()},
        numbers,
        timeout,
    )


def collect(
    made: Collector, of: Sequence[Task], size: int = 3, seed: int = 0
) -> list[RolloutGroup]:
    return asyncio.run(made.collect(of, SAMPLING, size, seed))


def test_groups_come_in_the_tasks_order_with_all_their_members() -> None:
    groups = collect(collector(), tasks(5))
    assert [g.task.id for g in groups] == [f"t{i}" for i in range(5)]
    for group in groups:
        assert len(group.rollouts) == 3 and len(group.usable) == 3
        for r in group.rollouts:
            assert r.token_ids[:2] == list(group.task.prompt_ids) and r.records[-1].sampled[:2] == [
                False,
                False,
            ]
            assert r.reward == r.num_sampled == len(r.completion_ids)


def test_seeds_depend_on_the_seed_and_the_place_alone() -> None:
    def drawn(seed: int, of: Sequence[Task]) -> list[list[list[int]]]:
        return [[r.completion_ids for r in g.rollouts] for g in collect(collector(), of, seed=seed)]

    first = drawn(7, tasks(4))
    assert first == drawn(7, tasks(4))
    assert first[:2] == drawn(7, tasks(2)), "what others there are changes nothing"
    assert first != drawn(8, tasks(4))
    assert all(len({tuple(c) for c in group}) == 3 for group in first), "siblings differ"


def test_derived_seeds_are_stable_and_distinct() -> None:
    assert derive_seed(0, 1) == derive_seed(0, 1) and 0 <= derive_seed(0, 1) < 2**63
    assert len({derive_seed(a, b) for a in range(30) for b in range(30)}) == 900
    assert derive_seed(1, 23) != derive_seed(12, 3)


class FailingEngine(FakeEngine):
    """Raises for some prompts, never answers others."""

    def __init__(self, errors: dict[int, Exception | None]) -> None:
        super().__init__()
        self.errors = errors
        self.cancelled = 0
        self.seeds: dict[int, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        mark = prompt_ids[-1]
        first = self.seeds.setdefault(mark, sampling.seed or 0) == sampling.seed
        if mark in self.errors and first:
            error = self.errors[mark]
            if error is not None:
                raise error
            pass_time = passing()
            try:
                for _ in range(1000):  # what others do is done by then
                    await asyncio.sleep(0)
                pass_time(3600.0)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await super().generate(prompt_ids, sampling)


def test_a_failing_generate_fails_its_own_rollout_only() -> None:
    errors = {10: EngineError("no memory"), 11: RuntimeError("odd"), 12: None}
    engine = FailingEngine(errors)
    scorer = Scorer()
    groups = collect(collector(engine, scorer), tasks(4))
    statuses = [[r.status for r in g.rollouts] for g in groups]
    ok = Status.OK
    assert statuses == [
        [Status.ENGINE_FAILED, ok, ok],
        [Status.ENVIRONMENT_FAILED, ok, ok],
        [Status.TIMED_OUT, ok, ok],
        [ok, ok, ok],
    ]
    failed = [g.rollouts[0] for g in groups[:3]]
    assert [r.error for r in failed] == [
        "no memory", "RuntimeError: odd", "not finished within 60 s (rollout.timeout)",
    ]  # fmt: skip
    assert all(r.reward is None for r in failed), "never a zero"
    assert engine.cancelled == 1, "what timed out is aborted"
    assert sorted(len(texts) for _, texts in scorer.calls) == [2, 2, 2, 3]


class Clumsy:
    """An environment that raises after the policy wrote."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        rollout.act(await generate(rollout.token_ids))
        raise self.error


def test_a_raising_environment_keeps_what_was_sampled_and_leaves_others_alone() -> None:
    environments: dict[str, Environment] = {
        "single_turn": SingleTurn(),
        "clumsy": Clumsy(KeyError("tool")),
    }
    groups = collect(collector(environments=environments), [*tasks(1), *tasks(1, "clumsy")])
    assert len(groups[0].usable) == 3 and not groups[1].usable
    for r in groups[1].rollouts:
        assert (
            r.status is Status.ENVIRONMENT_FAILED
            and r.error == "KeyError: 'tool'"
            and r.num_sampled > 0
        )


def test_an_environments_own_timeout_is_told_as_such() -> None:
    environments: dict[str, Environment] = {
        "single_turn": Clumsy(TimeoutError("the search tool did not answer"))
    }
    (group,) = collect(collector(environments=environments), tasks(1))
    assert group.rollouts[0].status is Status.TIMED_OUT
    assert group.rollouts[0].error == "TimeoutError: the search tool did not answer"


@pytest.mark.parametrize("error", [UserError("a prompt of 9 tokens"), RewardError("stop")])
def test_what_the_user_has_to_mend_comes_out_plainly_and_ends_the_rest(error: Exception) -> None:
    engine = FailingEngine({10: None, 11: error if isinstance(error, UserError) else None})

    class Raising(Scorer):
        async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:  # noqa: ARG002
            if isinstance(error, RewardError):
                raise error

    async def run() -> int:
        with pytest.raises(type(error)) as raised:
            await collector(engine, Raising()).collect(tasks(3), SAMPLING, 2, 0)
        assert raised.value is error
        assert not isinstance(raised.value, BaseExceptionGroup)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(run()) == 0, "nothing goes on in the background"


def test_finished_groups_are_scored_while_others_still_run() -> None:
    def script(prompt_ids: Sequence[int], sampling: Sampling) -> list[int]:  # noqa: ARG001
        return [5] * (2 if prompt_ids[-1] == 10 else 6)

    engine = Counting(lambda p, s: [*script(p, s)[:-1], 2])
    scorer = Scorer(engine)
    collect(collector(engine, scorer), tasks(2))
    assert [task for task, _ in scorer.calls] == ["t0", "t1"]
    assert scorer.running == [3, 0], "three of the second group were still being written"


def test_a_group_in_which_all_failed_is_not_scored() -> None:
    scorer = Scorer()
    environments: dict[str, Environment] = {"single_turn": Clumsy(ValueError("x"))}
    (group,) = collect(collector(scorer=scorer, environments=environments), tasks(1))
    assert not scorer.calls and not group.usable and len(group.rollouts) == 3


def test_no_tasks_give_no_groups() -> None:
    assert collect(collector(), []) == []
