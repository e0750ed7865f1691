"""The part of Tinker's interface that lists and keeps house: runs, checkpoints and sessions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from aiohttp import web
from pydantic import Field

from tunesmith.records.http_server import body_of
from tunesmith.run.tinker.requests import KeepFor, TinkerRequest, parse
from tunesmith.run.tinker.service import TinkerService, UnknownNameError
from tunesmith.run.tinker.store import SCHEME, Kind, StoredWeights

MOST = 1000
"""Entries of one page."""
_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_SAVED = "training_runs/{name}/checkpoints/{kind}/{file}"
Row = dict[str, object]


class Page(TinkerRequest):
    """The part of a list that is wanted. Whatever its scope or project: there is one owner."""

    offset: int = Field(0, ge=0)
    limit: int = Field(20, ge=0, le=MOST)
    access_scope: str | None = None
    project_id: str | None = None

    @classmethod
    def of(cls, request: web.Request) -> Page:
        return parse(cls, dict(request.query))

    def cut(self, rows: Sequence[Row]) -> tuple[Sequence[Row], Row]:
        """The rows of this page, and the cursor that describes it."""
        cursor: Row = {"offset": self.offset, "limit": self.limit, "total_count": len(rows)}
        return rows[self.offset : self.offset + self.limit], cursor


class ListRoutes:
    """Handlers: what clients have trained and saved here. The newest comes first."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    async def runs(self, request: web.Request) -> web.Response:
        rows = [self._run(name) for name in {*self._service.models, *self._service.store.models()}]
        rows.sort(key=lambda row: str(row["last_request_time"]), reverse=True)
        page, cursor = Page.of(request).cut(rows)
        return web.json_response({"training_runs": page, "cursor": cursor})

    async def run(self, request: web.Request) -> web.Response:
        return web.json_response(self._run(request.match_info["name"]))

    async def saved_by_run(self, request: web.Request) -> web.Response:
        rows = [row for _, row in self._saved(request.match_info["name"])]
        return web.json_response({"checkpoints": rows})

    async def saved(self, request: web.Request) -> web.Response:
        rows = [row for name in self._service.store.models() for _, row in self._saved(name)]
        rows.sort(key=lambda row: str(row["time"]), reverse=True)
        page, cursor = Page.of(request).cut(rows)
        return web.json_response({"checkpoints": page, "cursor": cursor})

    async def delete(self, request: web.Request) -> web.Response:
        self._service.store.remove(_address(request))
        return web.Response(status=204)

    async def keep(self, request: web.Request) -> web.Response:
        ask = parse(KeepFor, body_of(request))
        self._service.store.keep(_address(request), ask.ttl_seconds)
        return web.Response(status=204)

    async def sessions(self, request: web.Request) -> web.Response:
        page = Page.of(request)
        names = [*reversed(self._service.sessions)][page.offset : page.offset + page.limit]
        return web.json_response({"sessions": names})

    async def session(self, request: web.Request) -> web.Response:
        session = self._service.session(request.match_info["name"])
        names = {"training_run_ids": session.models, "sampler_ids": session.samplers}
        return web.json_response({key: sorted(values) for key, values in names.items()})

    def _run(self, name: str) -> Row:
        """Raises UnknownNameError: nothing of it is here."""
        rows = self._saved(name)
        saved = [facts for facts, _ in rows]
        live = self._service.models.get(name)
        if live is None and not saved:
            raise UnknownNameError(f"there is no training run '{name}' on this server")
        ranks = [live.lora.rank] if live and live.lora else [facts.rank for facts in saved]
        asked = [facts.time for facts in saved] + ([live.asked] if live else [])
        newest = {row["checkpoint_type"]: row for _, row in reversed(rows)}
        return {
            "training_run_id": name,
            "base_model": saved[0].base_model if saved else self._service.base.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": ranks[0] if ranks else None,
            "last_request_time": _text_of(max(asked)),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
        }

    def _saved(self, name: str) -> list[tuple[StoredWeights, Row]]:
        found = sorted(self._service.store.of_model(name), key=lambda each: -each[2].time)
        return [(each[2], _row(name, *each)) for each in found]


def listing_routes(service: TinkerService, root: str) -> list[web.RouteDef]:
    own = ListRoutes(service)
    get = {
        "training_runs": own.runs,
        "training_runs/{name}": own.run,
        "training_runs/{name}/checkpoints": own.saved_by_run,
        "checkpoints": own.saved,
        "sessions": own.sessions,
        "sessions/{name}": own.session,
    }
    return [
        *(web.get(f"{root}/{path}", handler) for path, handler in get.items()),
        web.delete(f"{root}/{_SAVED}", own.delete),
        web.put(f"{root}/{_SAVED}/ttl", own.keep),
    ]


def _row(model: str, kind: Kind, name: str, facts: StoredWeights) -> Row:
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": _TYPES[kind],
        "time": _text_of(facts.time),
        "tinker_path": f"{SCHEME}{model}/{kind}/{name}",
        "expires_at": None if facts.expires is None else _text_of(facts.expires),
    }


def _address(request: web.Request) -> str:
    place = request.match_info
    return f"{SCHEME}{place['name']}/{place['kind']}/{place['file']}"


def _text_of(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="microseconds")
