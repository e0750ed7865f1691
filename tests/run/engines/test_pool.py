"""Several engines behind one port: who is asked, and what happens when engines die, come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from tests.support.engine_contract import CHECKS, FREE, Subject
from tests.support.fake_engine import FakeEngine, numbers
from tests.support.fake_pool import CONTEXT, LONG, Bench, FakeMember, FakePlane
from tunesmith.errors import (
    ConfigError,
    EngineError,
    NoEngineError,
    NoPlaceError,
)
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.deadline import DEADLINE
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.engines.roster import BLOCK, Prefixes, blocks
from tunesmith.run.loop.groups import engine_metrics
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, Sampling


async def alone(count: int, sampling: Sampling = LONG) -> list[list[int]]:
    """What one engine would answer."""
    engine = FakeEngine(context=CONTEXT)
    return [
        (await engine.generate([30 + i] * 20, replace(sampling, seed=i))).token_ids
        for i in range(count)
    ]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_contract(check: Callable[[Subject], Awaitable[None]]) -> None:
    asyncio.run(check(Subject(Bench().pool, numbers, context=CONTEXT)))


async def test_the_bytes_of_a_sync_and_its_speed_are_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 bytes to each of two engines, also where one has to be offered them again; none without
    a plane."""
    monkeypatch.setattr("tunesmith.run.engines.pool.PAUSE", 0.0)
    bench = Bench(2)
    await bench.pool.load_weights(1)
    before = bench.pool.stats()
    bench.made[1].take_fails = [EngineError("the connection broke")]
    await bench.pool.load_weights(2)
    stats = bench.pool.stats().since(before)
    assert stats.sync_bytes == 2000 and stats.sync_seconds > 0
    found = engine_metrics(replace(stats, sync_seconds=0.5))
    assert (found["sync_bytes"], found["sync_bytes_per_second"]) == (2000.0, 4000.0)
    assert not any(name.startswith("sync") for name in engine_metrics(EngineStats()))
    await bench.pool.close()


async def test_a_group_goes_to_one_engine_and_groups_are_balanced() -> None:
    bench = Bench()
    groups = [[10 + g] * 24 for g in range(4)]
    await asyncio.gather(
        *(bench.pool.generate(p, replace(FREE, seed=i)) for p in groups for i in range(8))
    )
    of = [{prompt[0] for prompt in member.asked} for member in bench.made]
    assert not of[0] & of[1] and [len(prompts) for prompts in of] == [2, 2]
    # The next turn of a conversation goes where the first was, also while others are in flight.
    [spoke] = [member for member in bench.made if 10 in {p[0] for p in member.asked}]
    turn = [*groups[0], *range(100, 116)]
    before = len(spoke.asked)
    await bench.pool.generate(turn, replace(FREE, seed=0))
    assert len(spoke.asked) == before + 1


async def test_one_prompt_does_not_keep_a_single_engine_busy() -> None:
    bench = Bench()
    await asyncio.gather(
        *(bench.pool.generate([9] * 20, replace(FREE, seed=i)) for i in range(100))
    )
    fewer, more = sorted(len(member.asked) for member in bench.made)
    assert fewer >= 30 and more <= 70


def test_prefixes_count_whole_blocks_from_the_start() -> None:
    prefixes = Prefixes()
    prefixes.add(blocks(range(3 * BLOCK + 2)))
    assert prefixes.known(blocks(range(3 * BLOCK + 9))) == 3
    assert prefixes.known(blocks([*range(BLOCK), *range(BLOCK)])) == 1
    assert prefixes.known(blocks(range(1, BLOCK + 1))) == 0
    assert blocks(range(5)) != blocks(range(6)) and len(blocks(range(6))) == 1


async def test_what_a_lost_engine_was_asked_is_answered_once_by_others() -> None:
    bench = Bench()
    await bench.pool.load_weights(7)
    running = await bench.ask(10)
    await bench.made[0].kill()
    done = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert [c.token_ids for c in done] == await alone(10)
    assert all(set(c.versions) == {7} for c in done)
    assert sum(member.answered for member in bench.made) == 10
    await bench.engines(2)
    assert len(bench.made) == 3 and bench.made[0].closed and bench.made[2].engine.version == 7
    lost, joined = bench.said
    assert "fake 0 is no more: starting another" in lost and "1 of 2 engines" in lost
    assert "engine 0 has joined: 2 of 2 engines" in joined


async def test_an_engine_lost_while_weights_are_handed_out() -> None:
    """The others are told at once, and asked again with the new one."""

    bench = Bench(size=3)
    await bench.pool.load_weights(1)
    await bench.made[1].kill()
    bench.made[2].take_fails = [EngineError("another engine of this round failed")]
    await asyncio.wait_for(bench.pool.load_weights(2), 60)
    assert bench.plane.withdrawn >= 3
    await bench.engines(3)
    assert sorted(member.engine.version for member in bench.made) == [1, 2, 2, 2]
    assert bench.pool.members == [bench.made[0], bench.made[2], bench.made[3]]


async def test_weights_that_no_engine_can_take_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tunesmith.run.engines.pool.PAUSE", 0.01)
    bench = Bench()
    await bench.pool.load_weights(1)
    bench.made[1].take_fails = [EngineError("the connection broke")] * 2
    await bench.pool.load_weights(2)
    assert bench.made[1].engine.version == 2
    for member in bench.made:
        member.take_fails = [EngineError("the checksum of 'x' is wrong")] * 9
    with pytest.raises(EngineError, match="checksum of 'x'"):
        await bench.pool.load_weights(3)


async def test_one_engine_that_cannot_take_weights_is_found_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round ends for all when one fails; the last time each has its own."""
    monkeypatch.setattr("tunesmith.run.engines.pool.PAUSE", 0.0)
    bench = Bench(3)
    await bench.pool.load_weights(1)
    first = list(bench.made)
    first[1].take_fails = [EngineError("the connection broke")] * 9
    withdraw = bench.plane.withdraw

    async def end_round(offers: Sequence[Offer]) -> None:
        await withdraw(offers)
        if len(offers) > 1:
            first[0].take_fails = [EngineError("another engine of this round failed")]

    bench.plane.withdraw = end_round
    await bench.pool.load_weights(2)
    await bench.engines(3)
    assert first[1].closed and not first[0].closed and not first[2].closed
    assert [member.engine.version for member in bench.made if not member.closed] == [2, 2, 2]
    assert any("fake 1 is given up: the connection broke" in text for text in bench.said)


async def test_an_engine_that_comes_while_weights_change_has_the_newest() -> None:
    bench = Bench()
    await bench.pool.load_weights(1)
    running = await bench.ask(4)
    await bench.made[0].kill()
    bench.plane.seconds = 0.01
    loading = asyncio.create_task(bench.pool.load_weights(2))
    await asyncio.wait_for(asyncio.gather(*running, loading), 60)
    await bench.engines(2)
    assert [member.engine.version for member in bench.made[1:]] == [2, 2]


async def test_restarts_are_counted() -> None:
    bench = Bench(size=1, restarts=1)
    first = await bench.ask(1)
    await bench.made[0].kill()
    assert len((await first[0]).token_ids) == 40
    second = await bench.ask(1)
    await bench.made[1].kill()
    with pytest.raises(NoEngineError, match="fake 0 is no more, once too often"):
        await second[0]
    with pytest.raises(NoEngineError, match="once too often"):
        await bench.pool.load_weights(3)
    await bench.pool.close()


async def test_an_engine_that_cannot_start_ends_the_run() -> None:
    async def start(number: int) -> FakeMember:
        raise EngineError(f"engine {number} has no room")

    pool = EnginePool(start, FakePlane(), size=2)
    with pytest.raises(EngineError, match="has no room"):
        await pool.generate([1], FREE)
    with pytest.raises(EngineError, match="has no room"):
        await pool.load_weights(1)


async def test_the_others_go_on_when_no_restart_is_left() -> None:
    bench = Bench(3, restarts=0)
    await bench.pool.load_weights(1)
    running = await bench.ask(12)
    await bench.made[0].kill()
    await bench.made[2].kill()
    done = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert [c.token_ids for c in done] == await alone(12)
    await bench.pool.load_weights(2)
    assert bench.pool.members == [bench.made[1]] and bench.made[1].engine.version == 2
    assert len(bench.made) == 3
    first, second = bench.said
    assert "system.engine_restarts" in first and "2 of 3 engines" in first
    assert "1 of 3 engines" in second
    await bench.made[1].kill()
    with pytest.raises(NoEngineError, match="once too often"):
        await bench.pool.load_weights(3)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are tried again without a pause."""
    monkeypatch.setattr("tunesmith.run.engines.roster.RETRY", 0.0)


@pytest.mark.usefixtures("at_once")
async def test_a_place_that_is_gone_costs_no_restart_and_is_filled_when_it_is_back() -> None:
    bench = Bench(2, restarts=1)
    await bench.pool.load_weights(1)
    bench.refused = [NoPlaceError("the machine is gone")] * 9
    await bench.made[0].kill()
    assert (await bench.pool.generate([9] * 20, FREE)).token_ids
    await bench.pool.load_weights(2)  # with one engine
    assert bench.pool.roster.restarts_left == 1
    await bench.engines(2)
    assert bench.made[2].engine.version == 2 and bench.pool.roster.restarts_left == 1
    lost, gone, joined = bench.said
    assert "starting another" in lost
    assert "the machine is gone" in gone and "1 of 2 engines" in gone
    assert "2 of 2 engines" in joined


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("fault", [EngineError("not ready"), ConfigError("another model")])
async def test_an_engine_that_cannot_come_back_leaves_the_run_to_the_others(
    fault: Exception,
) -> None:
    """What fails at the start is refused (below); later, others are there."""
    bench = Bench(2)
    await bench.pool.load_weights(1)
    bench.refused = [fault] * 3
    await bench.made[0].kill()
    await bench.pool.load_weights(2)
    await bench.engines(2)
    assert bench.pool.roster.restarts_left == (2 if isinstance(fault, EngineError) else 5)


@pytest.mark.usefixtures("at_once")
async def test_without_any_engine_requests_wait_and_their_deadlines_with_them() -> None:
    bench = Bench(2)
    await bench.pool.load_weights(4)
    running = await bench.ask(4)
    bench.refused = [NoPlaceError("the machine is gone")] * 60
    for member in bench.made:
        await member.kill()

    async def late() -> Completion:
        async with asyncio.timeout(0.02) as deadline:
            DEADLINE.set(deadline)
            return await bench.pool.generate([9] * 20, FREE)

    await bench.engines(0)
    done = await asyncio.wait_for(asyncio.gather(late(), *running), 60)
    assert [c.token_ids for c in done[1:]] == await alone(4)
    assert all(set(c.versions) == {4} for c in done)


@pytest.mark.usefixtures("at_once")
async def test_a_run_without_engines_ends_when_none_comes_back_in_time() -> None:
    bench = Bench(2, patience=0.01)
    await bench.pool.load_weights(1)
    bench.refused = [NoPlaceError("the machine is gone")] * 10**6
    running = await bench.ask(2)
    for member in bench.made:
        await member.kill()
    for request in running:
        with pytest.raises(NoEngineError, match="the machine is gone; no engine has come back"):
            await request
    with pytest.raises(NoEngineError):
        await bench.pool.load_weights(2)


@pytest.mark.usefixtures("at_once")
async def test_a_request_that_waits_for_an_engine_is_interrupted() -> None:
    bench = Bench(1)
    await bench.pool.load_weights(1)
    bench.refused = [NoPlaceError("the machine is gone")] * 10**6
    await bench.made[0].kill()
    waiting = asyncio.create_task(bench.pool.generate([9] * 20, FREE))
    await bench.engines(0)
    await bench.pool.interrupt()
    done = await asyncio.wait_for(waiting, 60)
    assert (done.token_ids, done.finish_reason) == ([], "abort")
    await bench.pool.close()


async def test_no_engine_starts_in_the_trainers_turn() -> None:
    bench = Bench(2)
    await bench.pool.load_weights(1)
    await bench.made[0].kill()
    await bench.pool.sleep(2)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(bench.made) == 2 and bench.pool.members == [bench.made[1]]
    await bench.pool.load_weights(2)
    await bench.pool.wake()
    await bench.engines(2)
    assert bench.made[2].engine.version == 2
    await bench.pool.generate([9] * 20, FREE)


async def test_an_engine_that_fails_what_another_answers_is_replaced() -> None:
    bench = Bench(2)
    await bench.pool.load_weights(1)
    await bench.pool.generate([7] * 20, FREE)
    knows = next(member for member in bench.made if member.asked)
    knows.broken = True
    done = await asyncio.gather(*(bench.pool.generate([7] * 20, FREE) for _ in range(8)))
    assert all(completion.token_ids for completion in done)
    assert knows.closed and knows not in bench.pool.members
    assert "is given up" in bench.said[0] and "an illegal memory access" in bench.said[0]


async def test_a_request_that_no_engine_can_answer_fails_alone() -> None:
    bench = Bench(2)
    await bench.pool.load_weights(1)
    for member in bench.made:
        member.broken = True
    with pytest.raises(EngineError, match="an illegal memory access"):
        await bench.pool.generate([7] * 20, FREE)
    assert len(bench.pool.members) == 2 and not bench.said


async def test_closing_ends_engines_that_are_still_starting() -> None:
    bench = Bench()
    loading = asyncio.create_task(bench.pool.load_weights(1))
    while len(bench.made) < 2:
        await asyncio.sleep(0)
    await bench.pool.close()
    assert all(member.closed for member in bench.made)
    with pytest.raises(EngineError, match="closed"):
        await loading
