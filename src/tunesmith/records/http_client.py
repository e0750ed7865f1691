"""JSON from HTTP servers: one attempt, which answers are worth a retry, and how long to wait before
it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from tunesmith.errors import TunesmithError, shortened
from tunesmith.records.foreign import parse_json

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0
"""Seconds before the second attempt, doubled for each further one."""
MOST_WAIT = 86400.0
"""Seconds of a ``Retry-After`` that are taken for what they are."""
RETRIED = frozenset({408, 425, 429})
"""Statuses below 500 after which another attempt may work."""


class BadAnswer(TunesmithError, RuntimeError):
    """A server refused, or its answer cannot be used; a retry would not help."""


class Unavailable(TunesmithError, RuntimeError):
    """A server answered that it cannot serve now, perhaps for ``after`` seconds; or it did not
    answer, and ``late`` says whether it ran out of time."""

    def __init__(self, reason: str, after: float = 0.0, *, late: bool = False) -> None:
        super().__init__(reason)
        self.after = after
        self.late = late


def token_in(variable: str | None) -> str:
    """The token in an environment variable; empty if there is none."""
    return os.environ.get(variable or "", "").strip()


def open_session(seconds: float, token: str) -> aiohttp.ClientSession:
    """A session whose requests may take ``seconds``, and send the token if there is one. A session
    per call leaves nothing open between steps or after the run.

    Callers limit how many requests are in progress: by default aiohttp would let the 101st wait,
    and count that as part of its ``seconds``.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else None
    timeout = aiohttp.ClientTimeout(total=seconds)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector)


async def request_json(
    session: aiohttp.ClientSession,
    url: str,
    data: bytes | None = None,
    *,
    longest: int | None = None,
) -> Any:
    """The JSON answer to a GET, or to a POST of ``data``; None for an empty answer.

    Args:
        longest: limit of the answer's bytes.

    Raises:
        BadAnswer, Unavailable, TimeoutError, aiohttp.ClientError, OSError: there is no usable
        answer.
    """
    method = "GET" if data is None else "POST"
    headers = {"Content-Type": "application/json"}
    async with session.request(
        method, url, data=data, headers=headers, allow_redirects=False
    ) as response:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if longest is not None and len(body) > longest:
                response.close()
                limit = f"{longest} bytes, the limit of this request"
                raise BadAnswer(f"{url} answered more than {limit}")
    text = body.decode(errors="replace")
    if response.status >= 500 or response.status in RETRIED:
        after = seconds_to_wait(response.headers.get("Retry-After"))
        raise Unavailable(f"{url} answered {response.status}: {one_line(text)}", after)
    if response.status != 200:
        raise BadAnswer(f"{url} answered {response.status}: {one_line(text)}")
    try:
        return parse_json(text) if text else None
    except ValueError:
        raise BadAnswer(f"{url} did not answer with JSON: {one_line(text)}") from None


async def attempt_json(
    session: aiohttp.ClientSession, url: str, data: bytes, longest: int
) -> object:
    """The JSON answer to one POST. Raises BadAnswer or Unavailable: there is no usable answer."""
    try:
        return await request_json(session, url, data, longest=longest)
    except TimeoutError:
        late = f"{url} did not answer within {session.timeout.total:g} s"
        raise Unavailable(late, late=True) from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"had no answer from {url}: {error or type(error).__name__}") from None


async def request_patiently(
    session: aiohttp.ClientSession, url: str, data: bytes, longest: int, *, deadline: float
) -> object:
    """``attempt_json`` until there is an answer, with growing pauses or the server's.

    Raises:
        BadAnswer: another attempt would not help.
        Unavailable: the next attempt would start after ``deadline`` seconds.
    """
    end = time.monotonic() + deadline
    tried = 0
    while True:
        tried += 1
        wait = pause(tried)
        try:
            return await attempt_json(session, url, data, longest)
        except Unavailable as error:
            reason = str(error)
            wait += error.after
        if time.monotonic() + wait > end:
            raise Unavailable(f"{reason} (attempts: {tried})")
        await asyncio.sleep(wait)


def seconds_to_wait(said: str | None) -> float:
    """The seconds of a ``Retry-After`` header, which may be a date; 0 without one."""
    with suppress(ValueError):
        return max(0.0, min(float(said or 0), MOST_WAIT))
    with suppress(ValueError, TypeError):
        return max(0.0, min(parsedate_to_datetime(str(said)).timestamp() - time.time(), MOST_WAIT))
    return 0.0


def pause(failures: int) -> float:
    """Seconds to wait after this many failures: randomly between half and all of a pause, to spread
    callers out."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)


def one_line(text: str) -> str:
    return shortened(" ".join(text.split()), 300)
