"""Policies over HTTP, in the interfaces of OpenAI and Anthropic.

The server runs in its own thread. Each policy, such as an episode, has a key, sent as the API key
or in the path: ``http://HOST:PORT/KEY/v1``. Only policies that are open are served.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from tunesmith.errors import (
    ConfigError,
    EngineLostError,
    EpisodeError,
    NoEngineError,
    TunesmithError,
    boundary,
)
from tunesmith.learn.endpoint.asks import BadRequest, Fields, Json, UnknownModel
from tunesmith.learn.endpoint.chat import ChatExchange
from tunesmith.learn.endpoint.messages import MessagesExchange
from tunesmith.learn.endpoint.responses import ResponseExchange
from tunesmith.learn.endpoint.text import TextExchange
from tunesmith.learn.endpoint.turns import Answer, Event, Exchange, Policy, Spoken, check_name
from tunesmith.learn.environments.base import Growing
from tunesmith.learn.environments.conversation import OutOfRoom
from tunesmith.records.addresses import is_served_name
from tunesmith.records.foreign import parse_json
from tunesmith.records.http_server import (
    Limits,
    bearer_of,
    body_of,
    guarded,
    listening,
    url_of,
)

T = TypeVar("T")

HOST = "127.0.0.1"
START_SECONDS = 30.0
LARGEST_BODY = 64 * 2**20
LARGEST_TOGETHER = 2**30
"""Bytes of the bodies of one policy's requests in progress."""
LIMITS = Limits(connections=4096)
"""Each episode may have several calls in progress."""
INTERVAL = 0.02
"""Seconds between looks at what a streamed choice has new; more where a look takes long."""
LOOKS = 0.1
"""The largest share of the time that polling may take."""

Read = Callable[[Fields, Policy], Exchange]
INTERFACES: dict[str, Read] = {
    "chat/completions": ChatExchange,
    "completions": TextExchange,
    "responses": ResponseExchange,
    "messages": MessagesExchange,
}
"""By path below ``/v1``."""
COUNT = "messages/count_tokens"
HEALTH = "/health"
POSTED = ", ".join(f"/v1/{path}" for path in (*INTERFACES, COUNT))
SERVED = f"GET {HEALTH}, /v1/models, POST {POSTED}"


class Endpoint:
    """Serves ``SERVED``.

    Args:
        host: the address to listen on, also in the addresses that clients get.

    Raises:
        ConfigError: the address is not one of this machine, or in use.
    """

    def __init__(self, limits: Limits = LIMITS, host: str = HOST, port: int = 0) -> None:
        self._policies: dict[str, Policy] = {}
        self._for_all: Policy | None = None
        self._held = Counter[int]()
        """Bytes of bodies in progress, by ``id`` of their policy."""
        self._loop = asyncio.new_event_loop()
        self._serving = AsyncExitStack()
        self._host = host
        self._limits = limits
        threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True).start()
        listens = listening(self._app(), host, port, limits=limits, shutdown=1.0, cancels=True)
        with boundary(ConfigError, f"cannot listen on {host}:{port}", OSError):
            self.port = self._run(self._serving.enter_async_context(listens))

    @contextmanager
    def open(
        self, policy: Policy, key: str | None = None, *, for_all: bool = False
    ) -> Generator[tuple[str, str]]:
        """Serve a policy; gives its ``base_url`` and ``api_key``, either of which identifies it.

        Args:
            for_all: whether requests without its key reach it too.
        """
        key = key or secrets.token_hex(16)
        self._policies[key] = policy
        self._for_all = policy if for_all else None
        try:
            yield f"{url_of(self._host, self.port)}/{key}/v1", key
        finally:
            del self._policies[key]

    @asynccontextmanager
    async def reached_by(self, listener: socket.socket) -> AsyncGenerator[int]:
        """Serve by another socket too, such as one in another network; gives its port."""
        own: Any = {"listener": listener.dup(), "limits": self._limits}
        listens = listening(self._app(), **own, shutdown=0.0, cancels=True)
        port = await _on(self._loop, listens.__aenter__())
        try:
            yield port
        finally:
            await _on(self._loop, listens.__aexit__(None, None, None))

    def close(self) -> None:
        self._run(self._serving.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    def _app(self) -> web.Application:
        served = partial(is_served_name, self._host)
        guard = guarded(self._limits, None, refusal=_error, hosts=served, admitted=self._admitted)
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[guard])
        app.on_response_prepare.append(_close_connection)
        # Anthropic's clients append /v1 to the address that they are given.
        for prefix in ("/v1", "/{key}/v1", "/{key}/v1/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._models)
            app.router.add_post(f"{prefix}/{COUNT}", self._count)
            for path, read in INTERFACES.items():
                app.router.add_post(f"{prefix}/{path}", partial(self._serve, read))
        app.router.add_get(HEALTH, self._health)
        return app

    @contextmanager
    def _admitted(self, request: web.Request) -> Generator[Callable[[int], None]]:
        """Before a body is read: only those who have a key may send one, and only so much at once.

        Raises:
            HTTPException: the request is refused.
        """
        _check_route(request)
        policy = 0 if request.path == HEALTH else id(self._policy(request))
        declared = request.content_length or 0
        if declared > LARGEST_BODY:
            raise web.HTTPRequestEntityTooLarge(LARGEST_BODY, declared)
        held = 0

        def hold(size: int) -> None:
            """Count the body as ``size`` bytes; one in chunks, or compressed, grows as it comes."""
            nonlocal held
            more = max(0, size - held)
            if self._held[policy] + more > LARGEST_TOGETHER:
                gib = LARGEST_TOGETHER >> 30
                raise web.HTTPTooManyRequests(text=f"requests in progress have {gib} GiB; wait")
            held += more
            self._held[policy] += more

        try:
            hold(declared)
            yield hold
        finally:
            self._held[policy] -= held
            if not self._held[policy]:
                del self._held[policy]

    def _policy(self, request: web.Request) -> Policy:
        """Raises HTTPUnauthorized: no open policy has the request's key."""
        keys = (request.match_info.get("key"), bearer_of(request), request.headers.get("x-api-key"))
        policy = self._policies.get(next(filter(None, keys), ""), self._for_all)
        if policy is None:
            raise web.HTTPUnauthorized(text="no episode or model in service has this key")
        return policy

    async def _health(self, _: web.Request) -> web.Response:
        """Whether all that is served can be answered now."""
        if all(policy.available for policy in list(self._policies.values())):
            return web.json_response({"status": "ok"})
        return _error(503, "no engine is running")

    async def _models(self, request: web.Request) -> web.Response:
        """The list of models, which has one entry, or that model."""
        policy = self._policy(request)
        try:
            check_name(request.match_info.get("model"), policy)
        except UnknownModel as error:
            return _refusal(error)
        name = policy.model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "tunesmith"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        alone = "model" in request.match_info
        listed = {"object": "list", "data": [model], "has_more": False}
        return web.json_response(model if alone else listed)

    async def _count(self, request: web.Request) -> web.Response:
        policy = self._policy(request)
        body = _body(body_of(request))

        async def count() -> int:
            check_name(body.get("model"), policy)
            return policy.count(MessagesExchange(body, policy).ask)

        try:
            return web.json_response({"input_tokens": await _on(policy.loop, count())})
        except Exception as error:
            return _refusal(error)

    async def _serve(self, read: Read, request: web.Request) -> web.StreamResponse:
        policy = self._policy(request)
        body = _body(body_of(request))
        try:
            check_name(body.get("model"), policy)
            exchange = read(body, policy)
            if exchange.streamed:
                return await _Stream(request, exchange, policy).run()
            answer = await _on(policy.loop, policy.answer(exchange.ask))
            return web.json_response(exchange.whole(answer))
        except ConnectionError:
            raise  # the client has gone
        except Exception as error:
            return _refusal(error)


class _Stream:
    """A streamed answer. Until the policy has begun, an error is an answer of its own."""

    def __init__(self, request: web.Request, exchange: Exchange, policy: Policy) -> None:
        self._request = request
        self._exchange = exchange
        self._policy = policy
        choices = range(exchange.ask.choices)
        self._spoken = [Spoken(index, exchange.ask, policy) for index in choices]
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self._response = web.StreamResponse(headers=headers)

    async def run(self) -> web.StreamResponse:
        """Raises what ``Policy.answer`` does, before the stream begins."""
        asked = self._policy.answer(self._exchange.ask, self._follow)
        work = asyncio.ensure_future(_on(self._policy.loop, asked))
        try:
            while not work.done():
                began = time.monotonic()
                pieces = [piece for spoken in self._spoken if (piece := spoken.more())]
                for piece in pieces:
                    await self._send(self._exchange.add(piece))
                pause = max(INTERVAL, (time.monotonic() - began) / LOOKS)
                await asyncio.wait([work], timeout=pause)
            await self._finish(work)
        finally:
            work.cancel()  # if the client has gone, nobody waits for the policy
        await self._response.write_eof()
        return self._response

    async def _finish(self, work: asyncio.Future[Answer]) -> None:
        """Send what is left."""
        try:
            answer = work.result()
            pairs = zip(self._spoken, answer.replies, strict=True)
            rest = [spoken.rest(reply) for spoken, reply in pairs]
        except Exception as error:
            if not self._response.prepared:
                raise
            await self._send([("error", json.dumps(_problem(error)[1]))])
            return
        for piece in rest:
            await self._send(self._exchange.add(piece))
        await self._send(self._exchange.end(answer))

    def _follow(self, index: int, growing: Growing) -> None:
        self._spoken[index].follow(growing)

    async def _send(self, events: Iterable[Event]) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
            await self._write(self._exchange.begin())
        await self._write(events)

    async def _write(self, events: Iterable[Event]) -> None:
        for name, data in events:
            head = f"event: {name}\n" if name else ""
            await self._response.write(f"{head}data: {data}\n\n".encode())


async def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work`` on another event loop, where it is cancelled with the caller."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def _check_route(request: web.Request) -> None:
    """Raises HTTPNotFound, HTTPMethodNotAllowed: the path, or its method, is not served."""
    missing = request.match_info.http_exception
    here = f"{request.method} {request.path} is not served; valid:"
    if isinstance(missing, web.HTTPMethodNotAllowed):
        allowed = missing.allowed_methods
        text = f"{here} {', '.join(sorted(allowed))}"
        raise web.HTTPMethodNotAllowed(request.method, allowed, text=text)
    if missing is not None:
        raise web.HTTPNotFound(text=f"{here} {SERVED}")


def _body(raw: bytes) -> Fields:
    """Raises HTTPBadRequest: it is no JSON object."""
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the request is not a JSON object")
    return body


async def _close_connection(_: web.Request, response: web.StreamResponse) -> None:
    """A client shared by several episodes must not reuse a connection of an event loop that has
    ended."""
    response.force_close()
    response.headers["Connection"] = "close"


def _refusal(error: Exception) -> web.Response:
    status, body = _problem(error)
    return web.json_response(body, status=status)


def _problem(error: Exception) -> tuple[int, Json]:
    """The status of an answer that says an error, and the answer."""
    if isinstance(error, UnknownModel):
        return 404, _said(404, str(error), "model_not_found", error.param)
    if isinstance(error, EpisodeError):
        code = "context_length_exceeded" if isinstance(error, OutOfRoom) else None
        param = error.param if isinstance(error, BadRequest) else None
        return 400, _said(400, str(error), code, param)
    status = 503 if isinstance(error, EngineLostError | NoEngineError) else 500
    known = isinstance(error, TunesmithError)
    return status, _said(status, str(error) if known else f"{type(error).__name__}: {error}")


def _error(status: int, message: str) -> web.Response:
    code = "invalid_api_key" if status == 401 else None
    return web.json_response(_said(status, message, code), status=status)


def _said(status: int, message: str, code: str | None = None, param: str | None = None) -> Json:
    """An error as both OpenAI's and Anthropic's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "param": param, "code": code},
    }
