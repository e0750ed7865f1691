"""The policy with OpenAI's interface: requests and responses of ``chat.completions``, for one episode each.

The run says how the policy samples. ``max_tokens`` and ``stop`` of a request apply on top of that; a
``temperature`` and the like are overridden, which the rollout's notes say. What would change the answer's
form is refused.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tunesmith.environments.conversation import Conversation, Reply
from tunesmith.errors import EpisodeError
from tunesmith.types import Message

OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "functions": (None,),
    "function_call": (None, "none"),
}
"""What must not be asked for, and how not asking for it looks."""


class BadRequest(EpisodeError):
    """A request that cannot be answered as it is meant."""


class Session:
    """One episode's requests. Lives on the event loop of the engine."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = model
        self._conversation = conversation
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The response to one ``chat.completions`` request, as JSON has it.

        Raises:
            BadRequest: it asks for something that is not possible here; and what ``Conversation.reply`` raises.
        """
        if self._closed:
            raise BadRequest("this episode is over")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            messages, tools = _conversation_of(request)
            overridden = {name: request[name] for name in OVERRIDDEN if request.get(name) is not None}
            if overridden:
                self._conversation.rollout.notes.setdefault("overridden", {}).update(overridden)
            limit, stop = _limit(request), _stop(request)
            reply = await self._conversation.reply(messages, tools, max_new_tokens=limit, stop=stop)
            return _response(reply, self.model, self._conversation.turns)
        finally:
            self._running.discard(task)

    def close(self) -> None:
        """Answer nothing more; what is still being written is dropped."""
        self._closed = True
        for task in self._running:
            task.cancel()


def _limit(request: Mapping[str, Any]) -> int | None:
    given = (request.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((one for one in given if one is not None), None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadRequest(f"max_tokens is {limit!r}; it must be a whole number above 0")
    return limit


def _stop(request: Mapping[str, Any]) -> tuple[str, ...]:
    given = request.get("stop") or ()
    stop = (given,) if isinstance(given, str) else given
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise BadRequest(f"'stop' is {given!r}; it must be text or a list of texts")
    return tuple(stop)


def _conversation_of(request: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    for name, allowed in PLAIN.items():
        if request.get(name) not in allowed:
            raise BadRequest(f"'{name}' = {request[name]!r} is not possible here; leave it out")
    given = request.get("messages")
    if not isinstance(given, list | tuple) or not given:
        raise BadRequest("'messages' must be a list of at least one message")
    messages = [_as_message(m) for m in given]
    return messages, request.get("tools") or None


def _as_message(given: Any) -> Message:
    """A message as a dictionary; OpenAI's objects give one by ``model_dump``."""
    dump = getattr(given, "model_dump", None)
    message = dump(exclude_none=True) if callable(dump) else given
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"a message has a 'role' and 'content'; this one is {str(given)[:80]}")
    return dict(message)


def _response(reply: Reply, model: str, number: int) -> dict[str, Any]:
    reason = "tool_calls" if "tool_calls" in reply.message else reply.finish_reason
    message = {"content": None, "refusal": None, "tool_calls": None, **reply.message}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


class Attributes(dict[str, Any]):
    """JSON whose keys are attributes too, as in OpenAI's response objects."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        return {name: value for name, value in self.items() if not (exclude_none and value is None)}


class Client:
    """What an agent gets: ``await client.chat.completions.create(messages=..., tools=...)``, in process.

    May be used from any event loop.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> Any:
        if request.get("stream"):
            raise BadRequest("'stream' is for the HTTP endpoint (an agent that takes 'base_url'); leave it out")
        asked = asyncio.run_coroutine_threadsafe(self._session.complete(request), self._session.loop)
        return json.loads(json.dumps(await asyncio.wrap_future(asked)), object_hook=Attributes)
