"""The policy behind OpenAI's HTTP interface, for agents that bring a client of their own.

A server on the loopback interface, on a thread of its own. Each episode has a key; it is the API key, or
stands in the path: ``http://127.0.0.1:PORT/KEY/v1``. Only episodes that are being played are answered.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from typing import Any

from aiohttp import web

from tunesmith.environments.completions import BadRequest, Session
from tunesmith.environments.conversation import OutOfRoom
from tunesmith.errors import EpisodeError, TunesmithError

HOST = "127.0.0.1"
START_SECONDS = 30.0
LARGEST_BODY = 64 * 2**20


class Endpoint:
    """``GET /v1/models`` and ``POST /v1/chat/completions``, streamed as one chunk where asked for."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
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
            if self._runner is not None:
                await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self) -> int:
        app = web.Application(client_max_size=LARGEST_BODY)
        for prefix in ("", "/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        return self._runner.addresses[0][1]

    def _session(self, request: web.Request) -> Session | None:
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or (bearer.strip() if kind.lower() == "bearer" else "")
        return self._sessions.get(key)

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if session is None:
            return _unknown()
        model = {"id": session.model, "object": "model", "created": 0, "owned_by": "tunesmith"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return _unknown()
        try:
            body = await request.json()
        except ValueError as error:
            return _error(400, f"the request is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the request is not a JSON object")
        asked = asyncio.run_coroutine_threadsafe(session.complete(body), session.loop)
        try:
            response = await asyncio.wrap_future(asked)
        except OutOfRoom as error:
            return _error(400, str(error), "context_length_exceeded")
        except (BadRequest, EpisodeError) as error:
            return _error(400, str(error))
        except TunesmithError as error:
            return _error(500, str(error))
        if not body.get("stream"):
            return web.json_response(response)
        options = body.get("stream_options")
        return await _streamed(
            request, response, usage=isinstance(options, dict) and bool(options.get("include_usage"))
        )


async def _streamed(request: web.Request, response: dict[str, Any], *, usage: bool) -> web.StreamResponse:
    """Server-sent events: the whole turn in one chunk, the reason it ended in another, with ``usage`` the counts."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    choice = response["choices"][0]
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"]["tool_calls"] or ())]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {**{k: v for k, v in response.items() if k != "usage"}, "object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        *([{**head, "choices": [], "usage": response["usage"]}] if usage else []),
    ]
    for chunk in chunks:
        await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await stream.write(b"data: [DONE]\n\n")
    await stream.write_eof()
    return stream


def _unknown() -> web.Response:
    return _error(401, "no episode that is being played has this key", "invalid_api_key")


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
