"""Real HTTP servers on free ports of this machine, in a thread of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@contextmanager
def running(app: web.Application) -> Iterator[str]:
    """The address of an app while it is served."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


_TAKEN: list[socket.socket] = []


@dataclass
class Seen:
    """A reward server that a test gives the answers of, and what it was asked."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list[Any])


Answer = Callable[[Any, int], Any]
"""From a request's body and its number to JSON, a response, or an awaitable of either."""


@contextmanager
def answering(answer: Answer) -> Iterator[Seen]:
    seen = Seen()

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        seen.bodies.append(body)
        made = answer(body, len(seen.bodies))
        made = await made if isinstance(made, Awaitable) else made
        return made if isinstance(made, web.Response) else web.json_response(made)

    app = web.Application()
    app.add_routes([web.post("/reward", handle)])
    with running(app) as address:
        seen.url = f"{address}/reward"
        yield seen


def unused_url() -> str:
    """An address that nothing listens on: its port stays taken, so that no other server gets it."""
    _TAKEN.append(socket.socket())
    _TAKEN[-1].bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{_TAKEN[-1].getsockname()[1]}/reward"
