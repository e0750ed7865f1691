"""JSON to and from one HTTP server, which may restart meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from tunesmith.errors import EngineError, EngineLostError

T = TypeVar("T")

CONNECT = 10.0
"""Seconds for a connection to be made."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds before the first further attempt, doubled for each one after it."""
AGAIN = frozenset({408, 425, 429})
"""Answers below 500 after which it is worth trying again."""
LONGEST_LINE = 1 << 22


class Refused(EngineError):
    """The server answered that it will not do this."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(Exception):
    """The server cannot answer now, as far as one attempt tells."""


class Client:
    """One server.

    Args:
        patience: seconds for which a server that cannot be reached, or answers that it cannot serve, is asked
            again, with pauses that grow.
        deadline: seconds that one answer may take.
    """

    def __init__(self, url: str, *, patience: float, deadline: float) -> None:
        self.url = url.rstrip("/")
        self.patience, self.deadline = patience, deadline
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, path: str, body: Any = None, *, patience: float | None = None, deadline: float | None = None
    ) -> Any:
        """The JSON of an answer, None of an empty one. Raises Refused, EngineError, EngineLostError."""
        return await self.persist(lambda: self.once(path, body, deadline=deadline), patience)

    async def persist(self, attempt: Callable[[], Awaitable[T]], patience: float | None = None) -> T:
        """Try until it works, the server refuses, or it was away for ``patience`` seconds.

        Raises:
            EngineLostError: it was away for as long.
            EngineError: what ``attempt`` raised of these.
        """
        patience = self.patience if patience is None else patience
        failures, since = 0, 0.0
        while True:
            try:
                return await attempt()
            except (Unavailable, aiohttp.ClientError, OSError) as error:
                failures, since = failures + 1, since or time.monotonic()
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause - since > patience:
                    reason = str(error) or type(error).__name__
                    raise EngineLostError(
                        f"the server {self.url} cannot be used ({failures} attempts in {patience:g} s): {reason}"
                    ) from error
                await asyncio.sleep(pause)

    async def once(self, path: str, body: Any = None, *, deadline: float | None = None) -> Any:
        """One attempt: a GET, or a POST of ``body``.

        Raises:
            Refused, EngineError, EngineLostError, Unavailable, aiohttp.ClientError, OSError: what came of it.
        """
        method = "GET" if body is None else "POST"
        async with (
            self._deadline(path, deadline or self.deadline),
            self._open().request(method, self.url + path, json=body, allow_redirects=False) as response,
        ):
            data = await response.read()
            self._check(path, response.status, data)
            return self._json(path, data) if data else None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _deadline(self, path: str, seconds: float) -> AsyncGenerator[None]:
        """A limit on what happens inside: beyond it the engine counts as lost."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLostError(f"the server {self.url} has not answered {path} for {seconds:g} s") from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
            self._session = aiohttp.ClientSession(
                timeout=limits, connector=aiohttp.TCPConnector(limit=0), read_bufsize=LONGEST_LINE
            )
        return self._session

    def _check(self, path: str, status: int, data: bytes) -> None:
        if status != 200:
            said = f"{self.url}{path} answered {status}: {short(data.decode(errors='replace'))}"
            raise Unavailable(said) if status >= 500 or status in AGAIN else Refused(said, status)

    def _json(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            shown = short(data.decode(errors="replace"))
            raise EngineError(f"{self.url}{path} answered what is no JSON: {shown}") from None


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
