"""An agent's client within the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from tunesmith.learn.endpoint.asks import BadRequest, Fields, Json
from tunesmith.learn.endpoint.chat import ChatExchange
from tunesmith.learn.endpoint.messages import MessagesExchange
from tunesmith.learn.endpoint.responses import ResponseExchange
from tunesmith.learn.endpoint.text import TextExchange
from tunesmith.learn.endpoint.turns import Exchange, Policy


class Attributes(Json):
    """JSON whose keys are also attributes, as in OpenAI's response objects."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def output_text(self) -> str:
        """The text of all messages of a response."""
        messages = [item for item in self.output if item["type"] == "message"]
        parts = [part for message in messages for part in message["content"]]
        return "".join(part["text"] for part in parts)

    def model_dump(self, *, exclude_none: bool = False, **_: object) -> Json:
        return {name: value for name, value in self.items() if not (exclude_none and value is None)}


class PolicyClient:
    """Usable from any event loop: ``await client.chat.completions.create(messages=...)``.

    ``completions``, ``responses`` and Anthropic's ``messages`` work the same.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.chat = SimpleNamespace(completions=self._interface(ChatExchange))
        self.completions = self._interface(TextExchange)
        self.responses = self._interface(ResponseExchange)
        self.messages = self._interface(MessagesExchange)

    def _interface(self, kind: Callable[[Fields, Policy], Exchange]) -> SimpleNamespace:
        async def serve(request: Fields) -> Json:
            exchange = kind(request, self._policy)
            return exchange.whole(await self._policy.answer(exchange.ask))

        async def create(*, extra_body: Fields | None = None, **request: object) -> Any:
            if request.get("stream"):
                where = "the HTTP endpoint (an agent that takes 'base_url')"
                raise BadRequest(f"'stream' is for {where}; leave it out")
            work = serve({**request, **(extra_body or {})})
            answer = asyncio.run_coroutine_threadsafe(work, self._policy.loop)
            return json.loads(json.dumps(await asyncio.wrap_future(answer)), object_hook=Attributes)

        made: Callable[..., Awaitable[Any]] = create
        return SimpleNamespace(create=made)
