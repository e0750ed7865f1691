"""What keeps an HTTP server (aiohttp) answering: limits on time, size and connections, and a token.

``Gate`` counts connections and closes those that say nothing. ``guarded`` is the middleware that checks a request
before a handler sees it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Factory = Callable[[], asyncio.Protocol]
REFUSAL_SECONDS = 5.0
"""For a client to take the answer that its request came too late."""
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

quiet = logging.getLogger("tunesmith.http")
"""For aiohttp, which logs a traceback for every request that is no HTTP."""
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and numbers that a server allows."""

    head_seconds: float = 10.0
    """From the connection to a whole request head."""
    body_seconds: float = 60.0
    """For a request's body."""
    idle_seconds: float = 75.0
    """From an answer to the next request's head."""
    connections: int = 512
    """Open at once; at most half of the files that the process may have open."""


class Gate:
    """Lets in as many connections as there may be. Where it is full, the one that has waited longest makes room."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._most = min(limits.connections, _open_files() // 2)
        self.backlog = max(1, min(100, self._most // 4))
        """Connections that asyncio accepts at once, before any of them is counted."""
        self._inside: dict[asyncio.BaseTransport, _Connection] = {}

    def around(self, factory: Factory) -> Factory:
        """A protocol factory whose connections are counted."""
        return lambda: _Connection(self, factory())

    def body_begins(self, transport: asyncio.BaseTransport | None) -> None:
        """The head of a request has arrived: its body has a time limit, after which there is an answer to send."""
        if transport and (connection := self._inside.get(transport)):
            connection.wait_for(self.limits.body_seconds + REFUSAL_SECONDS)

    @contextmanager
    def busy(self, transport: asyncio.BaseTransport | None) -> Generator[None]:
        """While a request that has arrived is answered, its connection stays."""
        connection = self._inside.get(transport) if transport else None
        if connection is not None:
            connection.wait_for(None)
        try:
            yield
        finally:
            if connection is not None:
                connection.wait_for(self.limits.idle_seconds)

    def enter(self, transport: asyncio.Transport, connection: _Connection) -> bool:
        if len(self._inside) >= self._most:
            waiting = next((t for t, c in self._inside.items() if c.waiting), None)
            if waiting is None:
                return False
            self._inside.pop(waiting)
            cast("asyncio.Transport", waiting).abort()
        self._inside[transport] = connection
        return True

    def leave(self, transport: asyncio.BaseTransport) -> None:
        self._inside.pop(transport, None)


class _Connection(asyncio.Protocol):
    """Hands everything on to ``inner``, unless there is no room."""

    def __init__(self, gate: Gate, inner: asyncio.Protocol) -> None:
        self._gate, self._inner = gate, inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        return self._timer is not None

    def wait_for(self, seconds: float | None) -> None:
        """Close the connection in so many seconds; None: not before the next call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast("asyncio.Transport", transport)
        if not self._gate.enter(opened, self):
            opened.write(BUSY)
            opened.close()
            return
        self._transport = opened
        self._inner.connection_made(transport)
        self.wait_for(self._gate.limits.head_seconds)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._gate.leave(self._transport)
            self._inner.connection_lost(exc)
        self._transport = None
        self.wait_for(None)


def in_words(status: int, problem: str) -> web.Response:
    return web.json_response({"error": problem}, status=status)


def guarded(
    gate: Gate,
    token: str | None,
    open_paths: tuple[str, ...] = (),
    refusal: Callable[[int, str], web.Response] = in_words,
) -> Any:
    """Middleware: the request is meant for this server, may be made, has arrived in time, and fails in words.

    Without a token only names of this machine are answered, so that a web page whose name was bound to 127.0.0.1 cannot
    ask. With one it is asked for as ``Authorization: Bearer``, except on ``open_paths``. ``refusal`` makes the answer.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token is None and not is_loopback(host_name(request)):
                raise web.HTTPMisdirectedRequest(text=f"this server is not {request.host!a}")
            if token is not None and request.path not in open_paths and not has_token(request, token):
                raise web.HTTPUnauthorized(text="send the server's token, as Authorization: Bearer TOKEN")
            gate.body_begins(request.transport)
            try:
                async with asyncio.timeout(gate.limits.body_seconds):
                    await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(
                    text=f"the request did not arrive within {gate.limits.body_seconds:g} s"
                ) from None
            except (web.HTTPException, ConnectionError):
                raise
            except Exception as error:  # a broken encoding, and what else aiohttp finds
                raise web.HTTPBadRequest(text=f"the request's body cannot be read: {error!a}") from None
            with gate.busy(request.transport):
                return await handler(request)
        except web.HTTPException as error:
            answer = refusal(error.status, error.text or error.reason)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            print(f"{request.path}: {type(error).__name__}: {error}", file=sys.stderr)
            answer = refusal(500, f"{type(error).__name__}: {error}")
        if not request.content.at_eof():
            answer.force_close()  # what is left of the request is not waited for
        return answer

    return middleware


def has_token(request: web.Request, token: str) -> bool:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    sent = given.strip().encode(errors="replace")
    return hmac.compare_digest(sent, token.encode()) and kind.lower() == "bearer"


def host_name(request: web.Request) -> str:
    """Whom a request is meant for, without the port."""
    try:
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _open_files() -> int:
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return soft if soft > 0 else 1 << 20
    return 256
