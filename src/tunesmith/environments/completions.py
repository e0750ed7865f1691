"""The policy with OpenAI's interface: ``chat.completions``, ``completions`` and ``responses``, for one episode each.

The run decides how the policy samples. A request's ``max_tokens``, ``stop``, ``n`` and ``logprobs`` apply. A
``temperature`` and the like are overridden, and nothing forces the policy to write JSON or to call a tool; the
rollout's notes list such parameters.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tunesmith.environments.conversation import Conversation, Reply
from tunesmith.environments.responses import as_chat_request, as_response, check_kinds, input_messages, messages_of
from tunesmith.errors import EpisodeError
from tunesmith.types import Message

OVERRIDDEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "logit_bias"
)  # fmt: skip
FREE: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
}
"""Parameters that would bind the policy's answer, and the values with which they do not. Other values are noted."""
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
"""Parameters that change what the answer is made of, and the values with which they do not."""
MOST_ANSWERS = 128


class BadRequest(EpisodeError):
    """A request that cannot be answered as it is meant."""


class Session:
    """One episode's requests. Lives on the event loop of the engine."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = model
        self._conversation = conversation
        self._running: set[asyncio.Task[Any]] = set()
        self._responses: dict[str, list[Message]] = {}
        """What each response of the ``responses`` interface was said after, itself included, by its id."""
        self._numbers = 0
        self._closed = False

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one ``chat.completions`` request, as JSON has it.

        Raises:
            BadRequest: the request is malformed or cannot be served; and what ``Conversation.reply`` raises.
        """
        messages = _messages(request)
        tools = _tools(request)
        find_calls = request.get("tool_choice") != "none"
        limit, stop, options = _limit(request), _stop(request), _options(request)

        def ask() -> Awaitable[Reply]:
            return self._conversation.reply(
                messages, tools, max_new_tokens=limit, stop=stop, find_calls=find_calls, options=options
            )

        replies = await self._answers(request, ask)
        with_logprobs = bool(request.get("logprobs"))
        choices = [self._chat_choice(index, reply, with_logprobs) for index, reply in enumerate(replies)]
        return self._answer("chatcmpl", "chat.completion", choices, replies)

    async def complete_text(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one ``completions`` request: raw text or token ids that the policy goes on with.

        Raises:
            BadRequest: as in ``complete``; and what ``Conversation.continue_text`` raises.
        """
        prompt = _text_prompt(request)
        limit, stop = _limit(request), _stop(request)

        def ask() -> Awaitable[Reply]:
            return self._conversation.continue_text(prompt, max_new_tokens=limit, stop=stop)

        replies = await self._answers(request, ask)
        echo = prompt if request.get("echo") and isinstance(prompt, str) else ""
        with_logprobs = request.get("logprobs") is not None and request.get("logprobs") is not False
        choices = [
            {
                "index": index,
                "text": echo + reply.text,
                "finish_reason": _reason(reply),
                "logprobs": self._text_logprobs(reply, len(echo)) if with_logprobs else None,
            }
            for index, reply in enumerate(replies)
        ]
        return self._answer("cmpl", "text_completion", choices, replies)

    async def respond(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one ``responses`` request.

        Raises:
            BadRequest: as in ``complete``, or ``previous_response_id`` is unknown.
        """
        check_kinds(request)
        previous = request.get("previous_response_id")
        if previous is not None and previous not in self._responses:
            raise BadRequest(f"'previous_response_id' = {previous!r} names no response of this episode")
        said = [*self._responses.get(previous or "", []), *input_messages(request)]
        response = as_response(request, await self.complete(as_chat_request(request, said)))
        self._responses[response["id"]] = [*said, *messages_of(response["output"])]
        return response

    def close(self) -> None:
        """Answer nothing more; what is still being written is dropped."""
        self._closed = True
        for task in self._running:
            task.cancel()

    async def _answers(self, request: Mapping[str, Any], ask: Callable[[], Awaitable[Reply]]) -> list[Reply]:
        """``n`` answers to a request, written at once."""
        if self._closed:
            raise BadRequest("this episode is over")
        number = _number_of_answers(request)
        _refuse(request)
        self._note(request)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(_coroutine(ask())) for _ in range(number)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            self._running.discard(task)
        return [one.result() for one in asked]

    def _note(self, request: Mapping[str, Any]) -> None:
        notes = self._conversation.rollout.notes
        overridden = {name: request[name] for name in OVERRIDDEN if request.get(name) is not None}
        if overridden:
            notes.setdefault("overridden", {}).update(overridden)
        unbound = {name: request[name] for name, free in FREE.items() if request.get(name) not in free}
        if unbound:
            notes.setdefault("not_enforced", {}).update(unbound)

    def _answer(self, prefix: str, kind: str, choices: list[dict[str, Any]], replies: list[Reply]) -> dict[str, Any]:
        self._numbers += 1
        prompt, written = replies[0].prompt_tokens, sum(len(reply.completion.token_ids) for reply in replies)
        return {
            "id": f"{prefix}-{self._numbers}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
        }

    def _chat_choice(self, index: int, reply: Reply, with_logprobs: bool) -> dict[str, Any]:
        reason = "tool_calls" if "tool_calls" in reply.message else _reason(reply)
        message = {"content": None, "refusal": None, "tool_calls": None, **reply.message}
        logprobs = {"content": self._chat_logprobs(reply), "refusal": None} if with_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _chat_logprobs(self, reply: Reply) -> list[dict[str, Any]]:
        """Of the sampled tokens. Their alternatives are not known, so ``top_logprobs`` holds the token alone."""
        entries = [
            {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
            for text, logprob in self._tokens(reply)
        ]
        return [{**entry, "top_logprobs": [entry]} for entry in entries]

    def _text_logprobs(self, reply: Reply, offset: int) -> dict[str, Any]:
        tokens = self._tokens(reply)
        offsets = [offset + sum(len(text) for text, _ in tokens[:index]) for index in range(len(tokens))]
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": [{text: logprob} for text, logprob in tokens],
            "text_offset": offsets,
        }

    def _tokens(self, reply: Reply) -> list[tuple[str, float]]:
        """Text and log-probability of each token of a turn."""
        decoded = self._conversation.setting.renderer.decoded
        completion = reply.completion
        return [(decoded([t]), p) for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]


async def _coroutine(reply: Awaitable[Reply]) -> Reply:
    return await reply


def _reason(reply: Reply) -> str:
    return "length" if reply.finish_reason == "length" else "stop"


def _refuse(request: Mapping[str, Any]) -> None:
    for name, allowed in REFUSED.items():
        if request.get(name) not in allowed:
            raise BadRequest(f"'{name}' = {request[name]!r} cannot be served; leave it out")


def _number_of_answers(request: Mapping[str, Any]) -> int:
    number = request.get("n")
    number = 1 if number is None else number
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_ANSWERS:
        raise BadRequest(f"'n' is {number!r}; it must be a whole number from 1 to {MOST_ANSWERS}")
    return number


def _limit(request: Mapping[str, Any]) -> int | None:
    given = (request.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((one for one in given if one is not None), None)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadRequest(f"'max_tokens' is {limit!r}; it must be a whole number above 0")
    return limit


def _stop(request: Mapping[str, Any]) -> tuple[str, ...]:
    given = request.get("stop") or ()
    stop = (given,) if isinstance(given, str) else given
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"'stop' is {given!r}; it must be text of at least one character, or a list of such")
    return tuple(stop)


def _options(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    options = request.get("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise BadRequest(f"'chat_template_kwargs' is {options!r}; it must be an object")
    _check_text(options)
    return options


def _text_prompt(request: Mapping[str, Any]) -> str | list[int]:
    """The prompt of a ``completions`` request: text, or token ids; a list of one prompt is that prompt."""
    given = request.get("prompt")
    prompt = given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given
    ids: list[Any] = prompt if isinstance(prompt, list) else []
    if ids and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        return ids
    if isinstance(prompt, str) and prompt:
        _check_text(prompt)
        return prompt
    raise BadRequest("'prompt' must be text of at least one character, or a list of token ids; one prompt a request")


def _messages(request: Mapping[str, Any]) -> list[Message]:
    given = request.get("messages")
    if not isinstance(given, list | tuple) or not given:
        raise BadRequest("'messages' must be a list of at least one message")
    messages = [_as_message(m) for m in given]
    _check_text(messages)
    return messages


def _tools(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = request.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise BadRequest("'tools' must be a list of tools, each an object with a 'function'")
    _check_text(tools)
    return tools


def _check_text(value: Any) -> None:
    """Refuse text that no tokenizer takes (half of a surrogate pair), and what is no JSON."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the request has text that is no Unicode: {error.reason}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON: {error}") from error


def _as_message(given: Any) -> Message:
    """A message as a dictionary; OpenAI's objects give one by ``model_dump``. Templates know no ``developer``."""
    dump = getattr(given, "model_dump", None)
    message = dump(exclude_none=True) if callable(dump) else given
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"a message has a 'role' and 'content'; this one is {str(given)[:80]}")
    return {**message, "role": "system"} if message["role"] == "developer" else dict(message)


class Attributes(dict[str, Any]):
    """JSON whose keys are attributes too, as in OpenAI's response objects."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def output_text(self) -> str:
        """Of a response: all that its messages say."""
        parts = [part for item in self.output if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        return {name: value for name, value in self.items() if not (exclude_none and value is None)}


class Client:
    """What an agent gets, in process; may be used from any event loop.

    ``await client.chat.completions.create(messages=..., tools=...)``, and ``completions`` and ``responses`` alike.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._creator(session.complete)))
        self.completions = SimpleNamespace(create=self._creator(session.complete_text))
        self.responses = SimpleNamespace(create=self._creator(session.respond))

    def _creator(self, serve: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Awaitable[Any]]:
        async def create(*, extra_body: Mapping[str, Any] | None = None, **request: Any) -> Any:
            if request.get("stream"):
                raise BadRequest("'stream' is for the HTTP endpoint (an agent that takes 'base_url'); leave it out")
            asked = asyncio.run_coroutine_threadsafe(serve({**request, **(extra_body or {})}), self._session.loop)
            return json.loads(json.dumps(await asyncio.wrap_future(asked)), object_hook=Attributes)

        return create
