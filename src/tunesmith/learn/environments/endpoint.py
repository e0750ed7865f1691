"""The policy behind OpenAI's HTTP interface, for agents with their own client.

The server listens on the loopback interface, in its own thread. Each episode has a key, sent as the
API key or in the
path: ``http://127.0.0.1:PORT/KEY/v1``. Only episodes in progress are served.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from tunesmith.errors import EpisodeError, TunesmithError
from tunesmith.learn.environments.conversation import OutOfRoom
from tunesmith.learn.environments.openai_answers import (
    Event,
    chat_events,
    response_events,
    text_events,
)
from tunesmith.learn.environments.openai_api import EpisodeApi
from tunesmith.learn.environments.openai_requests import Fields, Json
from tunesmith.records.http_server import Limits, bearer_of, guarded, listening

T = TypeVar("T")

HOST = "127.0.0.1"
START_SECONDS = 30.0
LARGEST_BODY = 64 * 2**20
LIMITS = Limits(connections=4096)
"""Each episode may have several calls in progress."""
SERVED = "GET /v1/models, POST /v1/chat/completions, /v1/completions, /v1/responses"

Answer = Callable[[EpisodeApi, Fields], Coroutine[Any, Any, Json]]
Events = Callable[[Json, Fields], Iterator[Event]]
INTERFACES: dict[str, tuple[Answer, Events]] = {
    "chat/completions": (EpisodeApi.complete, chat_events),
    "completions": (EpisodeApi.complete_text, text_events),
    "responses": (EpisodeApi.respond, response_events),
}
"""By path: the method that answers, and the answer as events of a stream."""


class Endpoint:
    """Serves ``SERVED``; a streamed answer is sent in one piece."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._episodes: dict[str, EpisodeApi] = {}
        self._loop = asyncio.new_event_loop()
        self._serving = AsyncExitStack()
        threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True).start()
        listens = listening(self._app(limits), HOST, 0, limits=limits, shutdown=1.0, cancels=True)
        self.port = self._run(self._serving.enter_async_context(listens))

    @contextmanager
    def open(self, api: EpisodeApi) -> Generator[tuple[str, str]]:
        """Serve an episode; gives its ``base_url`` and ``api_key``, either of which identifies
        it."""
        key = secrets.token_hex(16)
        self._episodes[key] = api
        try:
            yield f"http://{HOST}:{self.port}/{key}/v1", key
        finally:
            del self._episodes[key]

    def close(self) -> None:
        self._run(self._serving.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    def _app(self, limits: Limits) -> web.Application:
        guard = guarded(limits, None, refusal=_error)
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[guard])
        app.on_response_prepare.append(_close_connection)
        for prefix in ("/v1", "/{key}/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model}}", self._models)
            for path, (answer, events) in INTERFACES.items():
                app.router.add_post(f"{prefix}/{path}", partial(self._serve, answer, events))
        app.router.add_route("*", "/{path:.*}", _not_served)
        return app

    def _episode(self, request: web.Request) -> EpisodeApi | None:
        return self._episodes.get(request.match_info.get("key") or bearer_of(request))

    async def _models(self, request: web.Request) -> web.Response:
        """The list of models, which has one entry, or that model."""
        api = self._episode(request)
        if api is None:
            return _unknown()
        model = {"id": api.model, "object": "model", "created": 0, "owned_by": "tunesmith"}
        alone = "model" in request.match_info
        return web.json_response(model if alone else {"object": "list", "data": [model]})

    async def _serve(
        self, answer: Answer, events: Events, request: web.Request
    ) -> web.StreamResponse:
        api = self._episode(request)
        if api is None:
            return _unknown()
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return _error(400, f"the request is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the request is not a JSON object")
        try:
            future = asyncio.run_coroutine_threadsafe(answer(api, body), api.loop)
            response = await asyncio.wrap_future(future)
        except EpisodeError as error:
            code = "context_length_exceeded" if isinstance(error, OutOfRoom) else None
            return _error(400, str(error), code)
        except Exception as error:
            known = isinstance(error, TunesmithError)
            return _error(500, str(error) if known else f"{type(error).__name__}: {error}")
        if not body.get("stream"):
            return web.json_response(response)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        for name, data in events(response, body):
            head = f"event: {name}\n" if name else ""
            await stream.write(f"{head}data: {data}\n\n".encode())
        await stream.write_eof()
        return stream


async def _close_connection(_: web.Request, response: web.StreamResponse) -> None:
    """A client shared by several episodes must not reuse a connection of an event loop that has
    ended."""
    response.force_close()
    response.headers["Connection"] = "close"


async def _not_served(request: web.Request) -> web.Response:
    return _error(404, f"{request.method} {request.path} is not served; valid: {SERVED}")


def _unknown() -> web.Response:
    return _error(401, "no episode in progress has this key", "invalid_api_key")


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
