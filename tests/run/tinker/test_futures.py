"""Requests in their order, each once."""

from __future__ import annotations

import asyncio

import pytest

from tunesmith.errors import UserError
from tunesmith.run.tinker.futures import Futures, RequestLine, Result, Work


def work(log: list[int], number: int) -> Work:
    async def run() -> Result:
        await asyncio.sleep(0)
        log.append(number)
        if number == 1:
            raise UserError("one")
        return {"number": number}

    return run


async def test_requests_run_in_the_order_of_their_numbers_and_once() -> None:
    futures = Futures()
    line = RequestLine("model", futures)
    log: list[int] = []
    names = {n: line.submit(n, work(log, n)) for n in (2, 0, 3, 1)}
    names |= {n: line.submit(n, work(log, n)) for n in (1, 2)}
    results = {n: await futures.wait(name, 60) for n, name in names.items()}
    assert log == [0, 1, 2, 3]
    assert results[1] == {"error": "one", "category": "user"}
    assert [results[n] for n in (0, 2, 3)] == [{"number": n} for n in (0, 2, 3)]
    assert line.submit(3, work(log, 3)) == names[3] and len(set(names.values())) == 4
    assert await futures.wait(names[3], 60) == {"number": 3}
    assert log == [0, 1, 2, 3]


async def test_a_request_waits_for_the_one_before_it() -> None:
    futures = Futures()
    line = RequestLine("model", futures)
    later = line.submit(1, work([], 2))
    assert await futures.wait(later, 0) is None
    line.submit(0, work([], 0))
    assert await futures.wait(later, 60) == {"number": 2}


async def test_old_results_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.run.tinker.futures.KEPT", 1)
    futures = Futures()
    for name in "abc":
        futures.start(name, work([], 0))
        assert await futures.wait(name, 60)
    assert ["a" in futures, "b" in futures, "c" in futures] == [False, True, True]


async def test_results_that_were_fetched_take_limited_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest of them are kept, and all that nobody has fetched."""
    monkeypatch.setattr("tunesmith.run.tinker.futures.FETCHED_BYTES", 10)
    futures = Futures()

    async def five() -> Result:
        return b"12345"

    for name in "abcd":
        futures.start(name, five)
    await asyncio.sleep(0)
    for name in "abbc":
        assert await futures.wait(name, 60) == b"12345"
    assert [name in futures for name in "abcd"] == [False, True, True, True]
