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
from tunesmith.types import Completion, FinishReason, Message, Record, Rollout, Task, text_of_content

TEXT = "text"
"""The key of a place that no conversation of messages goes on from."""


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
    """As a chat message, with ``tool_calls`` where it made some; cut before the request's stop string."""
    text: str
    """The same turn as plain text, without special tokens."""
    calls: list[ToolCall | BadCall]
    prompt_tokens: int
    completion: Completion

    @property
    def finish_reason(self) -> FinishReason:
        return self.completion.finish_reason


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
        find_calls: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The policy's next turn after ``messages``.

        Args:
            max_new_tokens: a limit for this turn, beside the run's own.
            stop: strings that end this turn. The record keeps them; the reply is cut before them.
            find_calls: whether tool calls in the turn are parsed or left as text.
            options: variables for the chat template, beside the run's own.

        Raises:
            OutOfRoom: ``max_turns`` or ``max_tokens`` are reached.
            EpisodeError: the messages cannot go through the chat template.
            EngineError: generation failed.
        """
        self._check_turns()
        renderer = self.setting.renderer.with_options(options) if options else self.setting.renderer
        record, said = self._record_of(messages, tools, renderer, options)
        prompt_tokens = len(record.token_ids)
        completion = await self._sample(record, max_new_tokens, stop)
        parse = self.setting.parse
        written, ids = renderer.text(completion.token_ids), completion.token_ids
        raw, text = before_stop(written, stop), before_stop(renderer.plain(ids), stop)
        content, calls = parse(raw, text) if parse and tools and find_calls else (text, [])
        if any(isinstance(call, BadCall) for call in calls):
            content = text  # Nothing that was said is lost.
        message = _assistant(content, calls, self.turns)
        shown = (*messages, message)
        said = (*said, {"role": "assistant", "content": written})
        self._places.append(_Place(record, len(record.token_ids), _key(shown, tools, options), said))
        self.rollout.messages = [dict(m) for m in self._after_prompt(shown)]
        return Reply(message, text, calls, prompt_tokens, completion)

    async def continue_text(
        self, prompt: str | Sequence[int], *, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> Reply:
        """What the policy writes after ``prompt``, which is raw text or token ids and skips the chat template.

        Raises:
            OutOfRoom, EngineError: as in ``reply``.
        """
        self._check_turns()
        record = self._record_of_text(prompt)
        prompt_tokens = len(record.token_ids)
        completion = await self._sample(record, max_new_tokens, stop)
        self._places.append(_Place(record, len(record.token_ids), (TEXT,), ()))
        text = before_stop(self.setting.renderer.plain(completion.token_ids), stop)
        return Reply({"role": "assistant", "content": text}, text, [], prompt_tokens, completion)

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

    def _check_turns(self) -> None:
        if self.turns >= self.setting.max_turns:
            raise OutOfRoom(f"the episode has reached its {self.turns} turns (environment.max_turns)")

    async def _sample(self, record: Record, max_new_tokens: int | None, stop: tuple[str, ...]) -> Completion:
        """Append the policy's next turn to a record."""
        limit = self.setting.max_tokens
        room = limit - len(record.token_ids)
        if room < 1:
            raise OutOfRoom(
                f"the conversation has {len(record.token_ids)} tokens and leaves no room for a turn: "
                f"the limit is {limit} (environment.max_tokens)"
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
        return completion

    def _record_of_text(self, prompt: str | Sequence[int]) -> Record:
        """The record that says ``prompt``: continued where its tokens already say the beginning, else a new one."""
        renderer = self.setting.renderer
        ends = renderer.end_ids
        best: tuple[_Place, int] | None = None
        for place in self._places:
            ids = place.record.token_ids
            # A client that was given a turn without its end token sends it back without one.
            lengths = [place.length, place.length - 1] if ids[place.length - 1] in ends else [place.length]
            for length in lengths:
                there = ids[:length] if not isinstance(prompt, str) else renderer.decoded(ids[:length])
                starts = prompt[: len(there)] == there if isinstance(prompt, str) else list(prompt[:length]) == there
                if starts and (best is None or (length, self._goes_on(place)) > (best[1], self._goes_on(best[0]))):
                    best = place, length
        if best is None:
            return self._begin(renderer.raw(prompt) if isinstance(prompt, str) else list(prompt))
        place, length = best
        ids = place.record.token_ids[:length]
        if isinstance(prompt, str):
            rest = renderer.after(ids, prompt[len(renderer.decoded(ids)) :])
        else:
            rest = list(prompt[length:])
        if length != place.length or not self._goes_on(place):
            return self._begin([*ids, *rest])
        place.record.observe(rest)
        return place.record

    def _record_of(
        self, messages: Sequence[Message], tools: Tools, renderer: Renderer, options: Mapping[str, Any] | None
    ) -> tuple[Record, tuple[Message, ...]]:
        """The record that says ``messages`` at its end, gone on with or begun; and its messages for the template."""
        key = _key(messages, tools, options)
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


def before_stop(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first of the strings ``stop`` in it."""
    return text[: min((place for end in stop if (place := text.find(end)) >= 0), default=len(text))]


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


def _key(messages: Sequence[Message], tools: Tools, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """What a rendering depends on as comparable text; names and ids, which an agent may leave out, do not count."""
    return (json.dumps([tools, options or {}], sort_keys=True), *map(_message_key, messages))


def _message_key(message: Message) -> str:
    normal = for_template(message)
    calls = [[call["function"].get("name"), call["function"].get("arguments")] for call in normal.get("tool_calls", ())]
    return json.dumps([normal.get("role"), normal["content"], calls], sort_keys=True, default=str)
