"""The HTTP interface of an SGLang server (as of SGLang 0.5.23), which may restart during a run."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from tunesmith.errors import EngineError, EngineLostError
from tunesmith.records.http_client import BadAnswer, Unavailable, one_line, pause, request_json
from tunesmith.types import FinishReason

T = TypeVar("T")

PATIENCE = 300.0
"""Seconds for which a server may be unreachable, for example while it restarts."""
LET_GO = 30.0
"""The same where other servers can take its requests meanwhile."""
CONNECT = 10.0
"""Seconds to establish a connection."""
ANSWER = 3600.0
"""Seconds that one completion may take."""
UPDATE = 1800.0
"""Seconds that loading weights may take."""
PROBE = 30.0
SILENCE = 120.0
"""Seconds between questions to a server that works on a long request, and for which it may leave
them unanswered: its machine may be gone without a word."""
ANSWER_BYTES = 1 << 28
"""Size limit of an answer; a token takes some tens of bytes."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The server's continuation of some tokens; ``tag`` names its weights."""

    token_ids: list[Any]
    logprobs: list[Any]
    finish_reason: FinishReason
    tag: str
    prompt_tokens: int
    cached_tokens: int


class SglangServer:
    """One server.

    All requests raise ``EngineLostError`` if the server was unavailable for ``patience`` seconds or
    did not answer in time, and ``EngineError`` if it refused or its answer cannot be used.

    Args:
        patience: seconds for which requests are retried while the server cannot be reached or
            cannot serve.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None
        self._long = 0
        """Long requests in flight."""
        self._watch: asyncio.Task[None] | None = None
        """Ends when the server falls silent during one."""
        self._aborts: set[asyncio.Task[Any]] = set()

    async def info(self, name: str, patience: float | None = None) -> dict[str, Any]:
        """The server's self-description: ``model_info`` or ``server_info``."""
        answer = await self.ask(f"/{name}", patience=patience)
        if not isinstance(answer, dict):
            raise EngineError(
                f"{self.url}/{name} answered {one_line(str(answer))}, which is not a JSON object"
            )
        return answer

    async def generate(self, input_ids: Sequence[int], settings: dict[str, Any]) -> Continuation:
        """The server's continuation of these tokens; cancelling aborts it there."""

        async def attempt() -> Any:
            name = uuid.uuid4().hex
            body = {
                "rid": name,
                "input_ids": list(input_ids),
                "sampling_params": settings,
                "return_logprob": True,
                "logprob_start_len": -1,
                "stream": False,
            }
            try:
                return await self._watched(self._once("/generate", body))
            except asyncio.CancelledError:
                task = asyncio.create_task(self._once("/abort_request", {"rid": name}, 10.0))
                self._aborts.add(task)
                task.add_done_callback(self._forget)
                raise

        answer = await self._persist(attempt)
        try:
            return _read(answer)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            shown = one_line(str(answer))
            raise EngineError(
                f"{self.url}/generate answered what SGLang 0.5.23 does not: {shown}"
            ) from None

    async def load(self, directory: Path, tag: str) -> None:
        """Abort all requests and load weights, which the server then reports as ``tag``. It stays
        paused."""
        update = {
            "model_path": str(directory),
            "load_format": "auto",
            "weight_version": tag,
            "flush_cache": True,
        }

        async def long(path: str, body: object) -> Any:
            return await self._persist(lambda: self._watched(self._once(path, body, UPDATE)))

        await long("/pause_generation", {"mode": "abort"})
        answer = await long("/update_weights_from_disk", update)
        current = (await self.info("model_info")).get("weight_version")
        if not answer["success"] or current != tag:
            message = one_line(str(answer.get("message")))
            raise EngineError(
                f"the SGLang server {self.url} did not load the weights '{tag}': it has "
                f"'{current}': {message}"
            )

    async def go_on(self, patience: float | None = None) -> None:
        """Resume after a pause."""
        await self.ask("/continue_generation", {}, patience=patience)

    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        patience: float | None = None,
        deadline: float | None = None,
    ) -> Any:
        """The JSON of an answer to a GET, or to a POST of ``body``; None for an empty answer."""
        return await self._persist(lambda: self._once(path, body, deadline), patience)

    async def _watched(self, request: Awaitable[T]) -> T:
        """The answer to a long request. Raises EngineLostError if the server falls silent."""
        self._long += 1
        watch = self._watch
        if watch is None or watch.done():
            watch = self._watch = asyncio.create_task(self._until_silent())
        work = asyncio.ensure_future(request)
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise EngineLostError(f"the server {self.url} has been silent for {SILENCE:g} s")
        finally:
            self._long -= 1
            if not self._long:
                watch.cancel()
                self._watch = None
            work.cancel()
            await asyncio.wait([work])

    async def _until_silent(self) -> None:
        heard = time.monotonic()
        while time.monotonic() - heard < SILENCE:
            try:
                await self._once("/model_info", None, SILENCE)
            except (EngineLostError, aiohttp.ClientError, OSError):
                pass
            except (EngineError, Unavailable):  # an answer, too
                heard = time.monotonic()
            else:
                heard = time.monotonic()
            await asyncio.sleep(PROBE)

    async def close(self) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _persist(
        self, attempt: Callable[[], Awaitable[T]], patience: float | None = None
    ) -> T:
        """Try until it works, the server refuses, or it was unavailable for ``patience``
        seconds."""
        patience = self._patience if patience is None else patience
        failures = 0
        since = 0.0
        while True:
            try:
                return await attempt()
            except (Unavailable, aiohttp.ClientError, OSError) as error:
                failures = failures + 1
                since = since or time.monotonic()
                seconds = pause(failures)
                if time.monotonic() + seconds - since > patience:
                    reason = str(error) or type(error).__name__
                    raise EngineLostError(
                        f"the server {self.url} cannot be used ({failures} attempts in "
                        f"{patience:g} s): {reason}"
                    ) from error
                await asyncio.sleep(seconds)

    async def _once(self, path: str, body: object, deadline: float | None = None) -> Any:
        deadline = ANSWER if deadline is None else deadline
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        data = None if body is None else json.dumps(body).encode()
        url = self.url + path
        limit = asyncio.timeout(deadline)
        try:
            async with limit:
                return await request_json(self._session, url, data, longest=ANSWER_BYTES)
        except BadAnswer as error:
            raise EngineError(str(error)) from None
        except TimeoutError:
            if not limit.expired():
                raise
            silent = f"has not answered {path} for {deadline:g} s"
            raise EngineLostError(f"the server {self.url} {silent}") from None

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._aborts.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a dead server has nothing to abort


def _read(answer: Any) -> Continuation:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    pairs = meta.get("output_token_logprobs") or []
    token_ids = [pair[1] for pair in pairs]
    logprobs = [pair[0] for pair in pairs]
    written = answer["output_ids"] if reason != "abort" else answer["output_ids"][: len(token_ids)]
    if written != token_ids or reason not in ("stop", "length", "abort"):
        raise ValueError
    counts = meta.get("prompt_tokens", 0), meta.get("cached_tokens", 0)
    return Continuation(token_ids, logprobs, reason, meta["weight_version"], *counts)
