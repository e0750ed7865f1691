"""The thread on which an engine computes."""

from __future__ import annotations

import asyncio
from threading import Event

from tunesmith.run.engines.step_thread import StepThread


async def test_requests_that_an_answer_brings_in_start_together() -> None:
    loop = asyncio.get_running_loop()
    first_came = Event()
    waiting: list[str] = []
    started: list[list[str]] = []

    def step() -> bool:
        if waiting:
            started.append(list(waiting))
        waiting.clear()
        return False

    def request(name: str) -> None:
        thread.post(lambda: waiting.append(name))

    def requests() -> None:
        request("first")
        first_came.set()
        loop.call_soon(request, "second")

    def load() -> None:
        loop.call_soon_threadsafe(requests)
        assert first_came.wait(60)

    thread = StepThread("steps", step, print)
    await thread.call(load)
    while not started:
        await asyncio.sleep(0)
    await thread.close(lambda: None)
    assert started == [["first", "second"]]
