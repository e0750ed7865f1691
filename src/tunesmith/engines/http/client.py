"""One server that engines talk to, which may restart meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

from tunesmith.errors import EngineError, EngineLostError
from tunesmith.http_client import BadAnswer, Unavailable, pause, request_json

T = TypeVar("T")

CONNECT = 10.0
"""Seconds for a connection to be made."""


class Refused(EngineError):
    """The server answered that it will not do this, or what cannot be used."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """One server.

    Args:
        patience: seconds for which requests are repeated while the server cannot be reached or cannot serve.
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
        """Try until it works, the server refuses, or it was unavailable for ``patience`` seconds.

        Raises:
            EngineLostError: it was unavailable for as long.
            EngineError: what ``attempt`` raised of these.
        """
        patience = self.patience if patience is None else patience
        failures, since = 0, 0.0
        while True:
            try:
                return await attempt()
            except (Unavailable, aiohttp.ClientError, OSError) as error:
                failures, since = failures + 1, since or time.monotonic()
                seconds = pause(failures)
                if time.monotonic() + seconds - since > patience:
                    reason = str(error) or type(error).__name__
                    raise EngineLostError(
                        f"the server {self.url} cannot be used ({failures} attempts in {patience:g} s): {reason}"
                    ) from error
                await asyncio.sleep(seconds)

    async def once(self, path: str, body: Any = None, *, deadline: float | None = None) -> Any:
        """One attempt: a GET, or a POST of ``body``.

        Raises:
            Refused, EngineLostError, Unavailable, aiohttp.ClientError, OSError: there is no answer to use.
        """
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
            self._session = aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0))
        data = None if body is None else json.dumps(body).encode()
        limit = asyncio.timeout(deadline or self.deadline)
        try:
            async with limit:
                return await request_json(self._session, self.url + path, data)
        except BadAnswer as error:
            raise Refused(str(error), error.status) from None
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = deadline or self.deadline
            raise EngineLostError(f"the server {self.url} has not answered {path} for {seconds:g} s") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
