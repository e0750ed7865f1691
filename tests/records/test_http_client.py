"""Servers that break the rules of HTTP: a request ends as a failure with its type or is repeated;
none hangs."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import pytest

from tunesmith.config.commands import TeacherSection
from tunesmith.config.judges import JudgeReward
from tunesmith.config.schema import RemoteReward
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.learn.rewards import remote
from tunesmith.learn.rewards.function import ItemFailure
from tunesmith.learn.rewards.judge_answers import AnswerFile, JudgeQuestion, ServedJudge
from tunesmith.learn.rewards.remote import RewardClient, remote_reward
from tunesmith.records import http_client
from tunesmith.run.engines.http import server as sglang
from tunesmith.run.loop import served_teacher
from tunesmith.run.loop.served_teacher import ServedTeacher
from tunesmith.types import Rollout, Sample, Status, Task

Script = Callable[[asyncio.StreamWriter, int], Awaitable[None]]
"""Writes the answer to the request of this number, counted from 1; then the connection is
closed."""


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def always(data: bytes) -> Script:
    async def write(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(data)

    return write


def once(data: bytes, then: bytes) -> Script:
    """Wrong at the first request alone."""

    async def write(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(data if number == 1 else then)

    return write


def endless(start: bytes, part: bytes, pause: float) -> Script:
    async def write(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(start)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return write


async def silent(writer: asyncio.StreamWriter, number: int) -> None:
    del writer, number
    await asyncio.sleep(600)


@contextmanager
def scripted(script: Script) -> Iterator[tuple[str, list[int]]]:
    """The address of a server that reads a request and runs the script, and the numbers of its
    requests."""
    loop = asyncio.new_event_loop()
    numbers = list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            )
            await reader.readexactly(int(length.split(b":")[1]))
            numbers.append(len(numbers) + 1)
            await script(writer, numbers[-1])
            await writer.drain()
        writer.close()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    opened = asyncio.run_coroutine_threadsafe(
        asyncio.start_server(serve, "127.0.0.1", 0), loop
    ).result(60)
    try:
        yield f"http://127.0.0.1:{opened.sockets[0].getsockname()[1]}", numbers
    finally:
        asyncio.run_coroutine_threadsafe(_end(opened), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


async def _end(opened: asyncio.Server) -> None:
    opened.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, small limits."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "ANSWER_BYTES", 100_000)
    monkeypatch.setattr(sglang, "ANSWER_BYTES", 100_000)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"
GZIP = "Content-Encoding: gzip"
LATE = "late"
LOST = "lost"
REFUSED = "refused"
WRONG: dict[str, tuple[Script, str]] = {
    "redirect": (always(answer(b"", "Location: http://127.0.0.1:1/", status="302 Found")), REFUSED),
    "no answer": (silent, LATE),
    "a byte at a time": (endless(CHUNKED, b"1\r\n \r\n", 0.05), LATE),
    "headers without end": (endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.05), LATE),
    "body without end": (endless(CHUNKED, b"2000\r\n" + b" " * 8192 + b"\r\n", 0.0), REFUSED),
    "bomb": (always(answer(gzip.compress(b" " * 10_000_000), GZIP)), REFUSED),
    "no gzip": (always(answer(b"{}", GZIP)), LOST),
    "cut short": (always(SHORT), LOST),
    "closed": (always(b""), LOST),
    "no HTTP": (always(b"hello\r\n\r\n"), LOST),
    "long header": (always(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000 + b"\r\n\r\n"), LOST),
    "long number": (always(answer(b"1" * 5000)), REFUSED),
    "half a character": (always(answer(b'{"rewards": ["\xff\xfe"]}')), REFUSED),
    "nothing": (always(answer(b"")), REFUSED),
    "not found": (always(answer(b"", status="404 Not Found")), REFUSED),
    "busy": (always(answer(b"", status="503 Service Unavailable")), LOST),
}


def ask_reward(url: str, size: int = 1, timeout: float = 60.0) -> list[Any]:
    async def ask() -> list[Any]:
        entry = RemoteReward(urls=(f"{url}/reward",), timeout=timeout, retries=1)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=entry.timeout)
        ) as session:
            return await RewardClient(entry).ask(session, {"prompts": ["x"] * size}, size)

    return asyncio.run(asyncio.wait_for(ask(), 120))


def ask_engine(url: str) -> Any:
    async def ask() -> Any:
        server = sglang.SglangServer(url, patience=0.05)
        try:
            return await server.generate([1], {})
        finally:
            await server.close()

    return asyncio.run(asyncio.wait_for(ask(), 120))


@pytest.mark.parametrize("name", WRONG)
def test_a_reward_server_that_breaks_the_rules_is_a_failure_with_its_type(name: str) -> None:
    script, kind = WRONG[name]
    with scripted(script) as (url, _):
        (score,) = ask_reward(url, timeout=0.1 if kind == LATE else 60.0)
    assert isinstance(score, ItemFailure) and url in score.reason
    assert score.status is (Status.TIMED_OUT if kind == LATE else Status.REWARD_FAILED)
    assert ("2 attempts" in score.reason) == (kind != REFUSED)


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_whose_server_breaks_the_rules_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, kind = WRONG[name]
    monkeypatch.setattr(sglang, "ANSWER", 0.1 if kind == LATE else 60.0)
    with scripted(script) as (url, _), pytest.raises(EngineError) as raised:
        ask_engine(url)
    assert isinstance(raised.value, EngineLostError) == (kind != REFUSED) and url in str(
        raised.value
    )


@pytest.mark.parametrize(
    "body",
    [
        "[NaN]",
        "[Infinity]",
        "[-Infinity]",
        "[1e999]",
        "[1e300]",
        '["0"]',
        "[{}]",
        "[[0.0]]",
        "[]",
        "[0.0, 0.0]",
        "0.0",
        "null",
    ],
)
def test_what_is_no_reward_is_never_a_reward_of_zero(body: str) -> None:
    with scripted(always(answer(f'{{"rewards": {body}}}'.encode()))) as (url, numbers):
        (score,) = ask_reward(url)
    assert isinstance(score, ItemFailure) and score.status is Status.REWARD_FAILED
    assert len(numbers) == 1


@pytest.mark.parametrize(
    "first",
    [
        b"",
        SHORT,
        b"hello\r\n\r\n",
        # Otherwise the second request may be sent on a connection that is about to be closed.
        answer(b"", "Connection: close", status="500 Oops"),
        answer(b"", "Connection: close", "Retry-After: 0", status="429 Slow"),
    ],
    ids=["closed", "cut short", "no HTTP", "failed", "too many"],
)
def test_what_passes_is_outlived(first: bytes) -> None:
    with scripted(once(first, answer(b'{"rewards": [0.5, null]}'))) as (url, numbers):
        assert ask_reward(url, 2) == [0.5, None]
    assert numbers == [1, 2]


def test_a_connection_that_is_kept_and_then_closed_is_opened_again() -> None:
    """The server promises to keep it, and closes it between two requests."""
    kept = answer(b'{"success": true}', "Connection: keep-alive", "Keep-Alive: timeout=600")

    async def ask(url: str) -> list[Any]:
        server = sglang.SglangServer(url, patience=60.0)
        answers = [await server.ask("/x", {}) for _ in range(3)]
        await server.close()
        return answers

    with scripted(always(kept)) as (url, numbers):
        assert asyncio.run(asyncio.wait_for(ask(url), 120)) == [{"success": True}] * 3
    assert len(numbers) == 3


MANY = 130


def judged(url: str) -> Any:
    entry = JudgeReward(model="m", url=url, concurrency=MANY, timeout=30, retries=0)
    judge = ServedJudge(entry, AnswerFile(None))
    return asyncio.run(judge.answers([JudgeQuestion(f"{n}", 0) for n in range(MANY)]))


def rewarded(url: str) -> Any:
    entry = RemoteReward(urls=(url,), batch_size=1, timeout=30, retries=0)
    rollouts = [Rollout(Task(f"{n}", "p", (1,), {})) for n in range(MANY)]
    reward = remote_reward(entry, "answer", str)
    return asyncio.run(reward.function(rollouts, [""] * MANY, {}))


def taught(url: str) -> Any:
    section = TeacherSection(path="org/t", url=url, concurrency=MANY, deadline=30)
    return ServedTeacher(section)([Sample([n, 1], [False, True]) for n in range(MANY)])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (judged, {"choices": [{"message": {"content": "yes"}}]}),
        (rewarded, {"rewards": [0.5]}),
        (taught, {"choices": [{"logprobs": {"token_logprobs": [None, -0.5]}}]}),
    ],
)
def test_as_many_requests_are_in_progress_as_was_said(
    ask: Callable[[str], Any], said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is answered before the last one has come."""
    monkeypatch.setattr(served_teacher, "ATTEMPT_SECONDS", 30.0)
    come = list[int]()

    async def write(writer: asyncio.StreamWriter, number: int) -> None:
        come.append(number)
        while len(come) < MANY:
            await asyncio.sleep(0.001)
        writer.write(answer(json.dumps(said).encode(), "Connection: close"))

    with scripted(write) as (url, _):
        found = ask(url)
    assert len(come) == MANY
    if ask is judged:
        assert found == ["yes"] * MANY
    elif ask is rewarded:
        assert found == [0.5] * MANY
    else:
        assert found["ref_logprobs"].tolist() == [-0.5] * MANY
