"""A reward over HTTP: what concurrent requests ask for is scored as one batch.

``POST /reward`` takes ``{"prompts": [...], "completions": [...], "columns": {...}}`` and answers
``{"rewards": [...]}``, with ``null`` where the reward does not apply. Where one could not be computed its place is
``null`` too, and ``"errors"``, a list of the same length, says why. ``GET /health`` tells what was done so far.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tunesmith.errors import ConfigError, EpisodeError, boundary
from tunesmith.rewards.base import NOT_COLUMNS, text_of
from tunesmith.rewards.batching import Batcher
from tunesmith.rewards.http_limits import Gate, Limits, guarded, has_token, quiet
from tunesmith.rewards.reward_set import RewardSet
from tunesmith.types import Prompt, Rollout, Status, Task, text_of_content

SHUTDOWN_SECONDS = 10.0
"""How long requests under way may take to finish when the server is told to stop."""


class Unscorable(ValueError):
    """What a request holds cannot be scored; told to the sender."""


@dataclass(frozen=True, slots=True)
class Item:
    """One completion of a request."""

    prompt: Prompt
    text: str
    columns: dict[str, Any]
    request: int


@dataclass(slots=True)
class RewardService:
    """Scores requests with a set of one reward."""

    rewards: RewardSet
    window: float
    """Seconds that the first request of a batch waits for others."""
    token: str | None = None
    """What requests have to send, if anything; ``GET /health`` without it is answered in short."""
    requests: int = 0
    completions: int = 0
    _batcher: Batcher[Item, tuple[float | None, str | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._batcher = Batcher(self._score, self.window)

    async def reward(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # which no web page can send here unasked
            raise web.HTTPUnsupportedMediaType(text="send JSON, with the header Content-Type: application/json")
        try:
            body = json.loads(await request.read())
            items = items_of(body, self.requests)
            self._check_columns(items)
        except (ValueError, RecursionError) as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        self.requests += 1
        self.completions += len(items)
        found = await self._batcher.submit(items) if items else []
        answer: dict[str, Any] = {"rewards": [reward for reward, _ in found]}
        if any(error for _, error in found):
            answer["errors"] = [error for _, error in found]
        return web.json_response(answer)

    async def health(self, request: web.Request) -> web.Response:
        if self.token is not None and not has_token(request, self.token):
            return web.json_response({"status": "ok"})
        counts = {"requests": self.requests, "completions": self.completions, "batches": self._batcher.batches}
        return web.json_response({"status": "ok", "reward": self.rewards.functions[0].reference, **counts})

    def _check_columns(self, items: Sequence[Item]) -> None:
        for name in sorted(self.rewards.functions[0].columns):
            if any(name not in item.columns for item in items):
                raise Unscorable(f"the reward needs the column '{name}': send it in \"columns\"")

    async def _score(self, items: list[Item]) -> list[tuple[float | None, str | None]]:
        found = await self._score_together(items)
        requests = {item.request for item in items}
        if len(requests) > 1 and all(error for _, error in found):
            # A function fails a whole call: one request's trouble is not to be another's.
            parts = [await self._score_together([i for i in items if i.request == n]) for n in sorted(requests)]
            return [one for part in parts for one in part]
        return found

    async def _score_together(self, items: list[Item]) -> list[tuple[float | None, str | None]]:
        (function,) = self.rewards.functions
        rollouts = [Rollout(Task(str(i), item.prompt, (), item.columns)) for i, item in enumerate(items)]
        await self.rewards.score(rollouts, [item.text for item in items])
        self.rewards.metrics([])  # Dropped: nobody reads what the function logs here.
        return [
            (r.rewards[function.name], None) if function.name in r.rewards else (None, r.error or Status.REWARD_FAILED)
            for r in rollouts
        ]


def items_of(body: Any, request: int) -> list[Item]:
    """The completions of a request's JSON, or a Unscorable that says what is wrong with it."""
    fields = body if isinstance(body, dict) else {}
    if unknown := fields.keys() - {"prompts", "completions", "columns"}:
        raise Unscorable(f"unknown key {sorted(unknown)[0]!r}; expected prompts, completions and columns")
    prompts, completions, columns = (fields.get(key) for key in ("prompts", "completions", "columns"))
    if not isinstance(prompts, list) or not isinstance(completions, list):
        raise Unscorable('expected {"prompts": [...], "completions": [...], "columns": {...}}')
    size = len(prompts)
    if len(completions) != size:
        raise Unscorable(f"{size} prompts, but {len(completions)} completions")
    columns = {} if columns is None else columns
    if not isinstance(columns, dict):
        raise Unscorable('"columns" must be an object of lists')
    for name, values in columns.items():
        if name in NOT_COLUMNS:
            raise Unscorable(f"{name!r} cannot be the name of a column")
        if not isinstance(values, list) or len(values) != size:
            raise Unscorable(f"the column {name!r} must be a list with one entry for each of {size} completions")
    return [
        Item(
            _checked(prompts[i], f"prompts[{i}]"),
            text_of(_checked(completions[i], f"completions[{i}]")),
            {name: values[i] for name, values in columns.items()},
            request,
        )
        for i in range(size)
    ]


def _checked(value: Any, place: str) -> Prompt:
    """Text, or messages with text in them."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(map(_is_message, value)):
        return value
    raise Unscorable(f'{place} must be text, or messages as in [{{"role": "user", "content": "text"}}]')


def _is_message(value: Any) -> bool:
    known: dict[str, Any] = value if isinstance(value, dict) else {}
    try:
        text_of_content(known.get("content"))
    except EpisodeError:
        return False
    return isinstance(known.get("role"), str) and ("content" in known or "tool_calls" in known)


GATE = web.AppKey("gate", Gate)


def make_app(
    service: RewardService, max_bytes: int, token: str | None = None, limits: Limits | None = None
) -> web.Application:
    """The server's routes; a request of more than ``max_bytes`` is refused with 413, one without the token with 401."""
    service.token, gate = token, Gate(limits or Limits())
    app = web.Application(client_max_size=max_bytes, middlewares=[guarded(gate, token, ("/health",))])
    app[GATE] = gate
    app.add_routes([web.post("/reward", service.reward), web.get("/health", service.health)])
    return app


async def serve(app: web.Application, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what is under way.

    Args:
        port: 0 takes a free one.
        ready: is told the address, such as ``http://127.0.0.1:8100``.

    Raises:
        ConfigError: the address is taken, or not this machine's.
    """
    runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_SECONDS, access_log=None, logger=quiet)
    await runner.setup()
    loop, stopped, listening = asyncio.get_running_loop(), asyncio.Event(), None
    loop.set_exception_handler(_in_a_line)
    try:
        assert runner.server is not None
        with boundary(ConfigError, f"cannot listen on {host}:{port}; choose another --host or --port", OSError):
            listening = await loop.create_server(app[GATE].around(runner.server), host, port, backlog=app[GATE].backlog)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.sockets[0].getsockname()[1]}")
        await stopped.wait()
    finally:
        if listening is not None:
            listening.close()
        await runner.cleanup()


def _in_a_line(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    del loop
    print(f"{context.get('message')}: {context.get('exception')}", file=sys.stderr)
