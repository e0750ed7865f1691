"""What is said in an episode, kept as tokens: a conversation that goes on appends, one that was edited forks.

Each call of the policy gets the whole conversation as messages. Where it begins with what a record says up to
one of its turns, the record's own tokens are taken, and only the messages that are new become tokens. Where
it does not (thinking dropped, history summarised, another conversation begun), or where the chat template
renders what was said differently now, or where the record has gone on meanwhile, a new record begins; what it
has in common with another is context there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, Literal

from tunesmith.environments.base import Generate
from tunesmith.environments.rendering import Renderer, Tools
from tunesmith.environments.tools import BadCall, Parse, ToolCall
from tunesmith.errors import EpisodeError, shortened
from tunesmith.types import FinishReason, Message, Record, Rollout, Task


class OutOfRoom(EpisodeError):
    """The conversation is as long as it may be, in turns or in tokens."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all episodes of a run have in common."""

    renderer: Renderer
    prompt_of: Callable[[Task], list[Message]]
    """A task's prompt as the messages that its tokens say."""
    max_turns: int
    """Calls of the policy."""
    max_tokens: int
    """Of a record: the whole conversation with what the policy writes."""
    parse: Parse | None
    """Finds tool calls in what the policy wrote, where there are tools."""
    timeout: float
    """Seconds of one call of the user's code."""
    bad_call: Literal["tell", "end"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy."""

    message: Message
    """As a chat message, with ``tool_calls`` where it made some."""
    text: str
    """What it wrote, without special tokens."""
    calls: list[ToolCall | BadCall]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a record from which the conversation can go on: after the prompt, or after a turn."""

    record: Record
    length: int
    key: tuple[str, ...]
    """What has been said, for comparison."""
    said: tuple[Message, ...]
    """The same for the template, with the policy's turns as it wrote them."""


@dataclass(slots=True)
class Conversation:
    """The policy as one episode speaks with it; writes the rollout's records."""

    rollout: Rollout
    generate: Generate
    setting: Setting
    prompt: Sequence[Message]
    """What the rollout's first record says."""
    prompt_tools: Tools = None
    turns: int = 0
    failure: Exception | None = None
    """What the engine raised first: an agent may hide it."""
    _writing: set[int] = field(default_factory=set[int])
    """``id`` of the records that the policy is writing to."""
    _places: list[_Place] = field(default_factory=list[_Place])

    def __post_init__(self) -> None:
        first, said = self.rollout.records[0], tuple(map(for_template, self.prompt))
        key = _key(self.prompt, self.prompt_tools)
        self._places.append(_Place(first, len(first.token_ids), key, said))

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> Reply:
        """The policy's next turn after ``messages``.

        Raises:
            OutOfRoom: ``max_turns`` or ``max_tokens`` are reached.
            EpisodeError: the messages cannot go through the chat template.
            EngineError: generation failed.
        """
        setting, renderer = self.setting, self.setting.renderer
        if self.turns >= setting.max_turns:
            raise OutOfRoom(f"{self.turns} turns are all there may be (environment.max_turns)")
        record, said = self._record_of(messages, tools)
        prompt_tokens = len(record.token_ids)
        room = setting.max_tokens - prompt_tokens
        if room < 1:
            raise OutOfRoom(
                f"the conversation has {prompt_tokens} tokens, which leaves no room for a turn: "
                f"{setting.max_tokens} are all there may be (environment.max_tokens)"
            )
        self.turns += 1
        self._writing.add(id(record))
        try:
            completion = await self.generate(
                record.token_ids, max_new_tokens=min(room, max_new_tokens or room), stop=stop
            )
        except Exception as error:
            self.failure = self.failure or error
            raise
        finally:
            self._writing.discard(id(record))
        record.act(completion)
        raw, text = renderer.text(completion.token_ids), renderer.plain(completion.token_ids)
        content, calls = setting.parse(raw, text) if setting.parse and tools else (text, [])
        if any(isinstance(call, BadCall) for call in calls):
            content = text  # Nothing that was said is lost.
        message = _assistant(content, calls, self.turns)
        shown = (*messages, message)
        said = (*said, {"role": "assistant", "content": raw})
        self._places.append(_Place(record, len(record.token_ids), _key(shown, tools), said))
        self.rollout.messages = [dict(m) for m in self._after_prompt(shown)]
        return Reply(message, text, calls, completion.finish_reason, prompt_tokens, len(completion.token_ids))

    def pay(self, reward: float) -> None:
        """Give the last turn a reward."""
        self._places[-1].record.pay(reward)

    def close(self) -> None:
        """Leave out of the rollout what never got a turn, and let the record that spoke last stand last."""
        for record in self.rollout.records:
            if record.turns:
                record.cut(record.turns[-1].stop)
        last = self._places[-1].record
        records = [r for r in self.rollout.records if r.turns and r is not last]
        self.rollout.records = [*records, last]

    def _record_of(self, messages: Sequence[Message], tools: Tools) -> tuple[Record, tuple[Message, ...]]:
        """The record that says ``messages`` at its end, gone on with or begun; and its messages for the template."""
        key, renderer = _key(messages, tools), self.setting.renderer
        held = [p for p in self._places if key[: len(p.key)] == p.key]
        if not held:
            said = tuple(map(for_template, messages))
            return self._begin(renderer.whole(said, tools)), said
        # The longest; of several as long (the same was said twice), one that has not gone on.
        place = max(held, key=lambda p: (len(p.key), self._goes_on(p)))
        new = tuple(map(for_template, messages[len(place.said) :]))
        said = (*place.said, *new)
        ids = place.record.token_ids[: place.length]
        rest = renderer.following(ids, place.said, new, tools)
        if rest is None:
            return self._begin(renderer.whole(said, tools)), said
        if not self._goes_on(place):
            return self._begin([*ids, *rest]), said
        place.record.observe(rest)
        return place.record, said

    def _goes_on(self, place: _Place) -> bool:
        """Whether the record can go on from there: it ends there, and the policy is not writing to it."""
        return len(place.record.token_ids) == place.length and id(place.record) not in self._writing

    def _begin(self, token_ids: list[int]) -> Record:
        record = Record()
        record.observe(token_ids)
        self.rollout.records.append(record)
        return record

    def _after_prompt(self, shown: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation without the prompt; from the first turn on, where the prompt was another one."""
        if _key(shown[: len(self.prompt)], None) == _key(self.prompt, None):
            return shown[len(self.prompt) :]
        return tuple(dropwhile(lambda message: message["role"] != "assistant", shown))


def text_of_content(content: Any) -> str:
    """The text of a message's ``content``: text, nothing, or a list of text parts; else an EpisodeError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise EpisodeError(f"a message's content is {type(content).__name__}; only text can be trained")


def for_template(message: Message) -> Message:
    """A message as chat templates expect it: text content, arguments of tool calls as objects."""
    made = {name: value for name, value in message.items() if value is not None}
    made["content"] = text_of_content(message.get("content"))
    calls = made.get("tool_calls") or []
    if calls:
        made["tool_calls"] = [_with_object(call) for call in (calls if isinstance(calls, list | tuple) else [calls])]
    return made


def _with_object(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise EpisodeError(f"'tool_calls' is a list of calls with a 'function'; this is none: {shortened(repr(call))}")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError):  # what was written as arguments may be no JSON
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _assistant(content: str, calls: Sequence[ToolCall | BadCall], turn: int) -> Message:
    made = [
        {
            "id": f"call_{turn}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(calls)
        if isinstance(call, ToolCall)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}


def _key(messages: Sequence[Message], tools: Tools) -> tuple[str, ...]:
    """Tools and messages as comparable text; names and ids, which an agent may leave out, do not count."""
    return (json.dumps(tools, sort_keys=True), *map(_message_key, messages))


def _message_key(message: Message) -> str:
    normal = for_template(message)
    calls = [[call["function"].get("name"), call["function"].get("arguments")] for call in normal.get("tool_calls", ())]
    return json.dumps([normal.get("role"), normal["content"], calls], sort_keys=True, default=str)
