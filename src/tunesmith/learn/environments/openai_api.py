"""The policy behind OpenAI's interfaces ``chat.completions``, ``completions`` and ``responses``,
for one episode."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

from tunesmith.learn.environments.conversation import Conversation, Reply
from tunesmith.learn.environments.openai_answers import as_response, chat_choice, text_choice
from tunesmith.learn.environments.openai_requests import (
    NOT_ENFORCED,
    OVERRIDDEN,
    BadRequest,
    ChatRequest,
    Fields,
    Json,
    Request,
    ResponseRequest,
    TextRequest,
    messages_of,
    parse,
)
from tunesmith.types import Message


class EpisodeApi:
    """Answers one episode's requests, on the event loop of the engine."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = model
        self._conversation = conversation
        self._decode = conversation.setting.renderer.verbatim
        self._running: set[asyncio.Task[Any]] = set()
        self._responses: dict[str, list[Message]] = {}
        """By response id: the conversation up to and including the response."""
        self._answers = 0
        self._closed = False

    async def complete(self, request: Fields) -> Json:
        """The answer to a ``chat.completions`` request, as JSON.

        Raises:
            BadRequest: the request is malformed or cannot be served; also the exceptions of
                ``Conversation.reply``.
        """
        chat = parse(ChatRequest, request)
        ask = partial(
            self._conversation.reply,
            chat.messages,
            chat.tools or None,
            find_calls=chat.tool_choice != "none",
            options=chat.chat_template_kwargs,
        )
        choice = partial(chat_choice, decode=self._decode if chat.logprobs else None)
        kind = ("chatcmpl", "chat.completion")
        return self._answer(kind, await self._replies(request, chat, ask), choice)

    async def complete_text(self, request: Fields) -> Json:
        """The answer to a ``completions`` request: the policy continues raw text or token ids.

        Raises:
            BadRequest: as in ``complete``; also the exceptions of ``Conversation.continue_text``.
        """
        text = parse(TextRequest, request)
        ask = partial(self._conversation.continue_text, text.prompt)
        echo = text.prompt if text.echo and isinstance(text.prompt, str) else ""
        wanted = text.logprobs is not None and request["logprobs"] is not False
        choice = partial(text_choice, echo=echo, decode=self._decode if wanted else None)
        kind = ("cmpl", "text_completion")
        return self._answer(kind, await self._replies(request, text, ask), choice)

    async def respond(self, request: Fields) -> Json:
        """The answer to a ``responses`` request.

        Raises:
            BadRequest: as in ``complete``, or ``previous_response_id`` is unknown.
        """
        parsed = parse(ResponseRequest, request)
        previous = parsed.previous_response_id
        if previous is not None and previous not in self._responses:
            unknown = f"'previous_response_id' = {previous!r}"
            raise BadRequest(f"{unknown} is not a response of this episode")
        messages = [*self._responses.get(previous or "", []), *messages_of(parsed.input)]
        response = as_response(request, await self.complete(parsed.as_chat(request, messages)))
        self._responses[response["id"]] = [*messages, *messages_of(response["output"])]
        return response

    def close(self) -> None:
        """Answer no further requests, and cancel those in progress."""
        self._closed = True
        for task in self._running:
            task.cancel()

    async def _replies(
        self,
        request: Fields,
        parsed: Request,
        ask: Callable[..., Coroutine[Any, Any, Reply]],
    ) -> list[Reply]:
        """``n`` concurrent answers to a request."""
        if self._closed:
            raise BadRequest("this episode is over")
        self._note(request)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with asyncio.TaskGroup() as group:
                limits = {"max_new_tokens": parsed.limit, "stop": tuple(parsed.stop)}
                replies = [group.create_task(ask(**limits)) for _ in range(parsed.n or 1)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            self._running.discard(task)
        return [reply.result() for reply in replies]

    def _note(self, request: Fields) -> None:
        """List, in the rollout's notes, the parameters that do not apply."""
        notes = self._conversation.rollout.notes
        overridden = [name for name in OVERRIDDEN if request.get(name) is not None]
        binding = [name for name, free in NOT_ENFORCED.items() if request.get(name) not in free]
        for note, names in (("overridden", overridden), ("not_enforced", binding)):
            if names:
                notes.setdefault(note, {}).update({name: request[name] for name in names})

    def _answer(
        self,
        kind: tuple[str, str],
        replies: list[Reply],
        choice: Callable[[int, Reply], Json],
    ) -> Json:
        """The answer as JSON; ``kind`` is the beginning of its id, and its ``object``."""
        self._answers += 1
        prompt = replies[0].prompt_tokens
        written = sum(len(reply.completion.token_ids) for reply in replies)
        return {
            "id": f"{kind[0]}-{self._answers}",
            "object": kind[1],
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice(index, reply) for index, reply in enumerate(replies)],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": written,
                "total_tokens": prompt + written,
            },
        }


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

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> Json:
        return {name: value for name, value in self.items() if not (exclude_none and value is None)}


class PolicyClient:
    """An agent's ``client`` within the process; usable from any event loop.

    ``await client.chat.completions.create(messages=..., tools=...)``; ``completions`` and
    ``responses`` work the same.
    """

    def __init__(self, api: EpisodeApi) -> None:
        self._loop = api.loop
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._creator(api.complete)))
        self.completions = SimpleNamespace(create=self._creator(api.complete_text))
        self.responses = SimpleNamespace(create=self._creator(api.respond))

    def _creator(self, serve: Callable[[Fields], Any]) -> Callable[..., Awaitable[Any]]:
        async def create(*, extra_body: Fields | None = None, **request: Any) -> Any:
            if request.get("stream"):
                where = "the HTTP endpoint (an agent that takes 'base_url')"
                raise BadRequest(f"'stream' is for {where}; leave it out")
            work = serve({**request, **(extra_body or {})})
            answer = asyncio.run_coroutine_threadsafe(work, self._loop)
            return json.loads(json.dumps(await asyncio.wrap_future(answer)), object_hook=Attributes)

        return create
