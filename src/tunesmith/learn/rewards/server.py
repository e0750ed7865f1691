"""Serves one reward over HTTP; concurrent requests are scored as one batch.

``POST /reward`` takes ``{"prompts": [...], "completions": [...], "columns": {...}}`` and answers
``{"rewards": [...]}``, with ``null`` where the reward does not apply or could not be computed; in
the latter case ``"errors"``, a list of the same length, holds the reason. ``GET /health`` reports
the counts so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, NamedTuple, Self

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from tunesmith.errors import EpisodeError
from tunesmith.learn.rewards.batching import Batcher
from tunesmith.learn.rewards.function import NOT_COLUMNS, text_of
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.records.http_server import LIMITS, Limits, bearer_of, body_of, guarded, is_token
from tunesmith.types import (
    FinishReason,
    Prompt,
    Rollout,
    Status,
    Task,
    Tools,
    Turn,
    text_of_content,
)


def _text_or_messages(value: object) -> Prompt:
    if isinstance(value, str) or (isinstance(value, list) and all(map(_is_message, value))):
        return value
    raise ValueError('must be text, or messages as in [{"role": "user", "content": "text"}]')


def _is_message(value: object) -> bool:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    try:
        text_of_content(fields.get("content"))
    except EpisodeError:
        return False
    return isinstance(fields.get("role"), str) and ("content" in fields or "tool_calls" in fields)


TextOrMessages = Annotated[Any, AfterValidator(_text_or_messages)]


class RewardRequest(BaseModel):
    """The body of ``POST /reward``."""

    model_config = ConfigDict(extra="forbid")
    prompts: list[TextOrMessages]
    completions: list[TextOrMessages]
    columns: dict[str, list[Any]] | None = None
    finish_reasons: list[FinishReason] | None = None
    """Reward models end a completion as in training only for ``stop``, the default."""
    tools: list[Tools] | None = None
    """JSON schemas of the tools that each prompt describes."""

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        columns = self.columns or {}
        reserved = NOT_COLUMNS & columns.keys()
        if reserved:
            raise ValueError(f"columns: '{min(reserved)}' cannot be the name of a column")
        prompts = len(self.prompts)
        lists = {"completions": self.completions, **columns}
        lists |= {"finish_reasons": self.finish_reasons, "tools": self.tools}
        for name, values in lists.items():
            if values is not None and len(values) != prompts:
                raise ValueError(f"{prompts} prompts, but '{name}' has {len(values)} entries")
        return self


class Item(NamedTuple):
    """One completion of a request."""

    prompt: Prompt
    completion: Any
    """Text, or the messages after the prompt."""
    columns: dict[str, Any]
    finish_reason: FinishReason
    tools: Tools
    request: int

    def as_rollout(self, number: int) -> Rollout:
        task = Task(str(number), self.prompt, (), self.columns, tools=self.tools)
        rollout = Rollout(task)
        rollout.records[-1].turns.append(Turn(0, 0, self.finish_reason))
        for message in self.completion if isinstance(self.completion, list) else ():
            plain = {**message, "content": text_of_content(message.get("content"))}
            rollout.messages = [*(rollout.messages or ()), plain]
        return rollout


Result = tuple[float | None, str | None]
"""A reward and the reason of a failure."""


@dataclass(slots=True)
class RewardService:
    """Scores requests with a ``RewardSet`` of one reward."""

    rewards: RewardSet
    window: float
    """Seconds that the first request of a batch waits for more."""
    token: str | None = None
    """The token that requests need, if any; ``GET /health`` without it returns only the status."""
    requests: int = 0
    completions: int = 0
    _batcher: Batcher[Item, Result] = field(init=False)

    def __post_init__(self) -> None:
        self._batcher = Batcher(self._score, self.window)

    async def reward(self, request: web.Request) -> web.Response:
        # Web pages of other origins cannot send JSON without CORS.
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send JSON as Content-Type: application/json")
        try:
            body = RewardRequest.model_validate_json(body_of(request))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            text = ": ".join(filter(None, (place, problem["msg"])))
            raise web.HTTPBadRequest(text=text) from None
        columns = body.columns or {}
        missing = self.rewards.functions[0].columns - columns.keys()
        if body.prompts and missing:
            raise web.HTTPBadRequest(text=f"columns: the reward needs the column '{min(missing)}'")
        reasons = body.finish_reasons
        tools = body.tools
        items: list[Item] = []
        for i, (prompt, completion) in enumerate(zip(body.prompts, body.completions, strict=True)):
            own = {name: values[i] for name, values in columns.items()}
            reason = reasons[i] if reasons else "stop"
            told = tools[i] if tools else None
            items.append(Item(prompt, completion, own, reason, told, self.requests))
        self.requests += 1
        self.completions += len(items)
        results = await self._batcher.submit(items) if items else []
        answer: dict[str, Any] = {"rewards": [reward for reward, _ in results]}
        if any(error for _, error in results):
            answer["errors"] = [error for _, error in results]
        return web.json_response(answer)

    async def health(self, request: web.Request) -> web.Response:
        health: dict[str, Any] = {"status": "ok"}
        if self.token is None or is_token(bearer_of(request), self.token):
            health["reward"] = self.rewards.functions[0].reference
            health["requests"] = self.requests
            health["completions"] = self.completions
            health["batches"] = self._batcher.batches
        return web.json_response(health)

    async def _score(self, items: list[Item]) -> list[Result]:
        results = await self._score_together(items)
        requests = [list(group) for _, group in groupby(items, key=lambda item: item.request)]
        if len(requests) == 1 or not all(error for _, error in results):
            return results
        # The function failed for the whole call: score each request alone, so that the good ones
        # succeed.
        return [result for one in requests for result in await self._score_together(one)]

    async def _score_together(self, items: list[Item]) -> list[Result]:
        (function,) = self.rewards.functions
        rollouts = [item.as_rollout(number) for number, item in enumerate(items)]
        await self.rewards.score(rollouts, [text_of(item.completion) for item in items])
        self.rewards.metrics([])  # discard what the function logged
        errors = [r.error or Status.REWARD_FAILED for r in rollouts]
        return [
            (r.rewards[function.name], None) if function.name in r.rewards else (None, error)
            for r, error in zip(rollouts, errors, strict=True)
        ]


def make_app(service: RewardService, max_bytes: int, limits: Limits = LIMITS) -> web.Application:
    """The server's routes. Requests above ``max_bytes`` are rejected with 413, requests without the
    token with 401."""
    guard = guarded(limits, service.token, ("/health",))
    app = web.Application(client_max_size=max_bytes, middlewares=[guard])
    app.add_routes([web.post("/reward", service.reward), web.get("/health", service.health)])
    return app
