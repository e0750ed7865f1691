"""The policy behind OpenAI's HTTP interface, for agents that bring a client of their own.

A server on the loopback interface, on a thread of its own. Each episode has a key; it is the API key, or
stands in the path: ``http://127.0.0.1:PORT/KEY/v1``. Only episodes that are being played are answered.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from tunesmith.environments.completions import Session
from tunesmith.environments.conversation import OutOfRoom
from tunesmith.environments.responses import stream_of
from tunesmith.errors import EpisodeError, TunesmithError
from tunesmith.rewards.http_limits import Gate, Limits, guarded, quiet

HOST = "127.0.0.1"
START_SECONDS = 30.0
LARGEST_BODY = 64 * 2**20
LIMITS = Limits(connections=4096)
"""Each episode may have several calls under way."""
SERVED = "GET /v1/models, POST /v1/chat/completions, /v1/completions, /v1/responses"


class Endpoint:
    """Serves ``SERVED``; a streamed answer comes as one chunk."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True).start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_SECONDS)

    def open(self, session: Session) -> tuple[str, str]:
        """``base_url`` and ``api_key`` for an episode; either alone says which episode it is."""
        key = secrets.token_hex(16)
        self._sessions[key] = session
        return f"http://{HOST}:{self.port}/{key}/v1", key

    def drop(self, key: str) -> None:
        """The episode is over."""
        self._sessions.pop(key, None)

    def close(self) -> None:
        async def stop() -> None:
            if self._listening is not None:
                self._listening.close()
            if self._runner is not None:
                await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self) -> int:
        gate = Gate(self.limits)
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[guarded(gate, None, refusal=_error)])
        app.on_response_prepare.append(_close_connection)
        for prefix in ("", "/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model}}", self._model)
            app.router.add_post(f"{prefix}/v1/chat/completions", partial(self._serve, _chat))
            app.router.add_post(f"{prefix}/v1/completions", partial(self._serve, _text))
            app.router.add_post(f"{prefix}/v1/responses", partial(self._serve, _response))
        app.router.add_route("*", "/{path:.*}", _not_served)
        self._runner = web.AppRunner(
            app, access_log=None, logger=quiet, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        assert self._runner.server is not None
        factory = gate.around(self._runner.server)
        self._listening = await self._loop.create_server(factory, HOST, 0, backlog=gate.backlog)
        return self._listening.sockets[0].getsockname()[1]

    def _session(self, request: web.Request) -> Session | None:
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or (bearer.strip() if kind.lower() == "bearer" else "")
        return self._sessions.get(key)

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return _unknown() if session is None else web.json_response({"object": "list", "data": [_model(session)]})

    async def _model(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return _unknown() if session is None else web.json_response(_model(session))

    async def _serve(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return _unknown()
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return _error(400, f"the request is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the request is not a JSON object")
        try:
            asked = asyncio.run_coroutine_threadsafe(kind.answer(session)(body), session.loop)
            response = await asyncio.wrap_future(asked)
        except OutOfRoom as error:
            return _error(400, str(error), "context_length_exceeded")
        except EpisodeError as error:
            return _error(400, str(error))
        except TunesmithError as error:
            return _error(500, str(error))
        except Exception as error:
            return _error(500, f"{type(error).__name__}: {error}")
        if not body.get("stream"):
            return web.json_response(response)
        return await _streamed(request, kind.events(response, body))


@dataclass(frozen=True, slots=True)
class Kind:
    """One of OpenAI's interfaces: who answers, and the answer as server-sent events (an event's name, its data)."""

    answer: Callable[[Session], Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]]
    events: Callable[[dict[str, Any], dict[str, Any]], Iterator[tuple[str | None, str]]]


def _chat_events(response: dict[str, Any], body: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
    """Each choice in one chunk and the reason it ended in another; then the counts, where they are asked for."""
    head = {**{k: v for k, v in response.items() if k != "usage"}, "object": "chat.completion.chunk"}
    for choice in response["choices"]:
        calls = [{"index": index, **call} for index, call in enumerate(choice["message"]["tool_calls"] or ())]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        whole = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        ended = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield from ((None, json.dumps({**head, "choices": [one]})) for one in (whole, ended))
    yield from _last_events(head, response, body)


def _text_events(response: dict[str, Any], body: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
    head = {k: v for k, v in response.items() if k != "usage"}
    yield from ((None, json.dumps({**head, "choices": [choice]})) for choice in response["choices"])
    yield from _last_events(head, response, body)


def _last_events(
    head: dict[str, Any], response: dict[str, Any], body: dict[str, Any]
) -> Iterator[tuple[str | None, str]]:
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield None, json.dumps({**head, "choices": [], "usage": response["usage"]})
    yield None, "[DONE]"


def _response_events(response: dict[str, Any], _: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
    yield from ((event["type"], json.dumps(event)) for event in stream_of(response))


_chat = Kind(lambda session: session.complete, _chat_events)
_text = Kind(lambda session: session.complete_text, _text_events)
_response = Kind(lambda session: session.respond, _response_events)


async def _streamed(request: web.Request, events: Iterator[tuple[str | None, str]]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for name, data in events:
        await stream.write(f"{f'event: {name}' + chr(10) if name else ''}data: {data}\n\n".encode())
    await stream.write_eof()
    return stream


async def _close_connection(_: web.Request, response: web.StreamResponse) -> None:
    """A client that a package shares between episodes must not reuse a connection of an event loop that has ended."""
    response.force_close()
    response.headers["Connection"] = "close"


def _model(session: Session) -> dict[str, Any]:
    return {"id": session.model, "object": "model", "created": 0, "owned_by": "tunesmith"}


async def _not_served(request: web.Request) -> web.Response:
    return _error(404, f"{request.method} {request.path} is not served; valid: {SERVED}")


def _unknown() -> web.Response:
    return _error(401, "no episode that is being played has this key", "invalid_api_key")


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
