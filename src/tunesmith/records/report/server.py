"""The page of runs that may be live, only on this machine and for anyone with its token."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tunesmith.records.http_server import LIMITS, Handler, guarded, is_token
from tunesmith.records.plain import JsonObject
from tunesmith.records.report.page import json_bytes, page
from tunesmith.records.report.rollouts import Query
from tunesmith.records.report.run import GrowingRun, group_json, model
from tunesmith.records.run_dir import is_running

AT_ONCE = 200
"""Maximum groups per answer."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(slots=True)
class Watch:
    """Answers the page's queries from the runs' files, after reading new lines."""

    runs: Sequence[GrowingRun]
    token: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _model: JsonObject = field(default_factory=lambda: {"version": 0})
    _running: list[bool] = field(default_factory=list[bool])

    def model(self) -> JsonObject:
        """The model, with a ``version`` that counts its changes and the ``seconds`` it took to
        build."""
        with self._lock:
            changed = [run.read_on() for run in self.runs]
            going_on = [is_running(run.path) for run in self.runs]
            if any(changed) or going_on != self._running:
                begun = time.perf_counter()
                version = self._model["version"] + 1
                self._running = going_on
                self._model = {**model(self.runs), "version": version}
                self._model["seconds"] = round(time.perf_counter() - begun, 3)
            return self._model

    def groups(self, asked: Mapping[str, str]) -> JsonObject:
        """Matching groups of a run, the newest first; ``next``: the position to continue from."""
        texts = {name: asked.get(name, "") for name in ("kind", "status", "text")}
        first, last, start = (
            int(asked[name]) if asked.get(name) else None for name in ("first", "last", "start")
        )
        query = Query(**texts, first=first, last=last)
        with self._lock:
            index = self._run(asked).rollouts
            index.read_on()
            places, following = index.find(query, start, AT_ONCE)
            return {"groups": [group_json(index, place) for place in places], "next": following}

    def lines(self, asked: Mapping[str, str]) -> JsonObject:
        """The rollouts of a group; none if it is no longer in the files."""
        with self._lock:
            index = self._run(asked).rollouts
            index.read_on()
            return {"lines": index.lines(int(asked["place"]))}

    def _run(self, asked: Mapping[str, str]) -> GrowingRun:
        number = int(asked["run"])
        if not 0 <= number < len(self.runs):
            raise ValueError(f"there is no run {number}")
        return self.runs[number]


def make_app(watch: Watch) -> web.Application:
    """The page itself needs the token in its address, which opens it; its requests need it in a
    header."""

    async def show(request: web.Request) -> web.Response:
        if not is_token(request.query.get("token", ""), watch.token):
            how = "open the address that tunesmith watch printed, with its token"
            raise web.HTTPUnauthorized(text=how)
        document = await asyncio.to_thread(lambda: page({"live": True, "model": watch.model()}))
        headers = {**HEADERS, "Content-Type": "text/html; charset=utf-8"}
        return web.Response(body=document, headers=headers)

    async def show_model(request: web.Request) -> web.Response:
        made = await asyncio.to_thread(watch.model)
        seen = request.query.get("seen") == str(made["version"])
        return web.Response(status=204) if seen else _json(made)

    def answering(answer: Callable[[Mapping[str, str]], JsonObject]) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            try:
                return _json(await asyncio.to_thread(answer, request.query))
            except (ValueError, KeyError) as error:
                raise web.HTTPBadRequest(text=f"{type(error).__name__}: {error}") from None

        return handler

    app = web.Application(middlewares=[guarded(LIMITS, watch.token, ("/",))])
    app.router.add_get("/", show)
    app.router.add_get("/api/model", show_model)
    app.router.add_get("/api/groups", answering(watch.groups))
    app.router.add_get("/api/lines", answering(watch.lines))
    return app


def _json(value: Any) -> web.Response:
    return web.Response(body=json_bytes(value), content_type="application/json", headers=HEADERS)
