"""An engine in a Ray actor: a member of an ``EnginePool``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from tunesmith.cluster.remote import Remote
from tunesmith.engines.base import RpcMember
from tunesmith.errors import EngineError, TunesmithError, UserError

CLOSING = 10.0
"""Seconds an engine has to end what it runs before its process is killed."""


class RayEngine(RpcMember):
    """``remote`` holds an object with ``ask``, which answers the requests of ``engines.worker``, and ``close``."""

    def __init__(self, remote: Remote) -> None:
        super().__init__()
        self.remote = remote

    @property
    def name(self) -> str:
        return self.remote.name

    async def ask(self, do: str, **values: Any) -> Any:
        answer = await self.remote.call_async("ask", {"id": 0, "do": do, **values})
        if "error" in answer:
            raise (UserError if answer["user"] else EngineError)(answer["error"])
        self.update_stats(answer["stats"])
        return answer["result"]

    async def close(self) -> None:
        with suppress(TunesmithError, TimeoutError):
            await asyncio.wait_for(self.remote.call_async("close"), CLOSING)
        self.remote.close()
