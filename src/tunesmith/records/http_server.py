"""HTTP servers (aiohttp) with limits on time, size and connections, and with a token.

``guarded`` is the middleware that checks a request before its handler runs. ``listening`` serves an
application and counts its connections. ``serve`` does so until a signal ends the process.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import web

from tunesmith.errors import ConfigError, boundary
from tunesmith.records.addresses import is_loopback, is_wildcard
from tunesmith.records.plain import JsonObject

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SHUTDOWN_SECONDS = 10.0
"""Time for requests in progress to finish when the server is stopped."""
REFUSAL_SECONDS = 5.0
"""Time to send a client the answer that its request arrived too late."""
BODY = "body"
"""Where a request keeps its body."""
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

quiet = logging.getLogger("tunesmith.http")
"""aiohttp's logger; it would log a traceback for every request that is not HTTP."""
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server."""

    head_seconds: float = 10.0
    """From the connection to a complete request head."""
    body_seconds: float = 60.0
    """For a request's body."""
    idle_seconds: float = 75.0
    """From an answer to the head of the next request."""
    connections: int = 512
    """Open at the same time; at most half of the process's limit of open files."""


LIMITS = Limits()


async def listen(
    factory: Callable[[], asyncio.Protocol],
    limits: Limits,
    host: str,
    port: int,
    listener: socket.socket | None = None,
) -> asyncio.Server:
    """Serve with the protocols of ``factory``, at an address or by a socket that listens already. A
    connection beyond the limit replaces one that is idle."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # negative if unlimited
    most = limits.connections if files < 0 else min(limits.connections, files // 2)
    opened = dict[_Connection, None]()
    at_once = max(1, min(100, most // 4))  # asyncio accepts so many before they are counted

    def connection() -> _Connection:
        return _Connection(factory(), limits, opened, most)

    create = asyncio.get_running_loop().create_server
    if listener is not None:
        return await create(connection, sock=listener, backlog=at_once)
    return await create(connection, host, port, backlog=at_once)


class _Connection(asyncio.Protocol):
    """Forwards everything to ``inner``, unless too many connections are open.

    Args:
        opened: the server's connections, in the order in which they were opened.
    """

    def __init__(
        self, inner: asyncio.Protocol, limits: Limits, opened: dict[_Connection, None], most: int
    ) -> None:
        self._inner = inner
        self._limits = limits
        self._opened = opened
        self._most = most
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the connection is idle."""

    def close_after(self, seconds: float | None) -> None:
        """Close the connection after ``seconds``; None stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        assert self._transport is not None, "the connection was made"
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)
        if len(self._opened) >= self._most:
            idle = next((one for one in self._opened if one._timer is not None), None)
            if idle is None:
                made.write(BUSY)
                made.close()
                return
            del self._opened[idle]
            idle.abort()
        self._opened[self] = None
        self._transport = made
        inner = self._inner
        self.data_received = inner.data_received
        self.eof_received = inner.eof_received
        self.pause_writing = inner.pause_writing
        self.resume_writing = inner.resume_writing
        inner.connection_made(transport)
        self.close_after(self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._opened.pop(self, None)
            self._inner.connection_lost(exc)
        self._transport = None
        self.close_after(None)


def guarded(
    limits: Limits,
    token: str | None,
    open_paths: tuple[str, ...] = (),
    refusal: Callable[[int, str], web.Response] = lambda status, problem: web.json_response(
        {"error": problem}, status=status
    ),
    hosts: Callable[[str], bool] | None = None,
    admitted: Callable[[web.Request], AbstractContextManager[Callable[[int], None]]] = (
        lambda _: nullcontext(lambda _: None)
    ),
) -> Any:
    """Middleware that checks host, token and time limit of a request, and answers errors with
    ``refusal``.

    Only the host names ``hosts`` are served; without a token, these are the loopback names unless
    others are named, so that a web page whose name was rebound to 127.0.0.1 has no access. With a
    token, requests need it as ``Authorization: Bearer``, except on ``open_paths``. ``admitted`` is
    entered before a request's body is read, and gives a function that is called with the bytes that
    have come so far; both may refuse the request (``web.HTTPException``). Handlers get the body
    from ``body_of``.
    """

    if hosts is None and token is None:
        hosts = is_loopback

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if hosts is not None and not hosts(host_name(request)):
                raise web.HTTPMisdirectedRequest(text=f"this server is not {request.host!a}")
            needed = None if request.path in open_paths else token
            if needed is not None and not is_token(bearer_of(request), needed):
                how = "send the server's token, as Authorization: Bearer TOKEN"
                raise web.HTTPUnauthorized(text=how)
            with admitted(request) as coming:
                close_after = _closing_after(request)
                close_after(limits.body_seconds + REFUSAL_SECONDS)
                await _read(request, limits.body_seconds, coming)
                close_after(None)
                try:
                    return await handler(request)
                finally:
                    close_after(limits.idle_seconds)
        except web.HTTPException as error:
            answer = refusal(error.status, error.text or error.reason)
            if isinstance(error, web.HTTPMethodNotAllowed):
                answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            if isinstance(error, web.HTTPUnauthorized):
                answer.headers["WWW-Authenticate"] = "Bearer"
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            print(f"{request.path}: {type(error).__name__}: {error}", file=sys.stderr)
            answer = refusal(500, f"{type(error).__name__}: {error}")
        if not request.content.at_eof():
            answer.force_close()  # do not wait for the rest of the request
        return answer

    return middleware


async def _read(request: web.Request, seconds: float, coming: Callable[[int], None]) -> None:
    """Read the body for ``body_of``. Raises HTTPException: it is late or too large, or cannot be
    read."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > request.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
                coming(len(body))
    except TimeoutError:
        late = f"the request did not arrive within {seconds:g} s"
        raise web.HTTPRequestTimeout(text=late) from None
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:  # such as a broken encoding
        raise web.HTTPBadRequest(text=f"the request's body cannot be read: {error!a}") from None
    request[BODY] = bytes(body)


def body_of(request: web.Request) -> bytes:
    """The body of a request that ``guarded`` let through."""
    return request[BODY]


def _closing_after(request: web.Request) -> Callable[[float | None], None]:
    """Sets the seconds after which the request's connection is closed, if ``listen`` opened it."""
    protocol = request.transport.get_protocol() if request.transport else None
    return protocol.close_after if isinstance(protocol, _Connection) else lambda _: None


@asynccontextmanager
async def listening(
    app: web.Application,
    host: str = "",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    limits: Limits,
    shutdown: float,
    cancels: bool = False,
) -> AsyncGenerator[int]:
    """Serve ``app``; yields the port, a free one where ``port`` is 0. Raises OSError: the address
    cannot be used.

    Args:
        listener: a socket that listens already, instead of ``host`` and ``port``.
        shutdown: seconds for requests in progress to finish at the end.
        cancels: whether a handler is cancelled when its client disconnects.
    """
    runner = web.AppRunner(
        app, access_log=None, logger=quiet, handler_cancellation=cancels, shutdown_timeout=shutdown
    )
    await runner.setup()
    try:
        assert runner.server is not None
        server = await listen(runner.server, limits, host, port, listener)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


async def serve(
    app: web.Application,
    host: str,
    port: int,
    ready: Callable[[str], None],
    stopped: asyncio.Event | None = None,
) -> None:
    """Serve with the usual limits until SIGTERM or Ctrl-C, then finish the requests in progress.

    Args:
        port: 0 picks a free one.
        ready: called with the address, such as ``http://127.0.0.1:8100``.
        stopped: when it is set, the server ends, too.

    Raises:
        ConfigError: the address is in use, or not one of this machine.
    """
    loop = asyncio.get_running_loop()
    stopped = stopped or asyncio.Event()

    def on_error(_: asyncio.AbstractEventLoop, context: JsonObject) -> None:
        print(f"{context.get('message')}: {context.get('exception')}", file=sys.stderr)

    loop.set_exception_handler(on_error)
    async with AsyncExitStack() as serving:
        refused = f"cannot listen on {host}:{port}; choose another --host or --port"
        with boundary(ConfigError, refused, OSError):
            listens = listening(app, host, port, limits=LIMITS, shutdown=SHUTDOWN_SECONDS)
            port = await serving.enter_async_context(listens)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        ready(url_of(host, port))
        await stopped.wait()


def is_token(text: str, token: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(text.encode(errors="replace"), token.encode())


def bearer_of(request: web.Request) -> str:
    """The token of ``Authorization: Bearer``; empty if there is none."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def host_name(request: web.Request) -> str:
    """The host that a request is meant for, without the port."""
    try:
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        return ""


def url_of(host: str, port: int) -> str:
    """The address of a server that listens on ``host``, as its clients reach it."""
    name = socket.gethostname() if is_wildcard(host) else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
