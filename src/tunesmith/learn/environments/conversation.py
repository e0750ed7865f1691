"""An episode's conversation as tokens: a continued conversation appends to its record, an edited
one forks.

Each call of the policy gets the whole conversation as messages. If it begins with the content of a
record up to one of its turns, the record's tokens are kept and only the new messages are tokenized.
If it does not (thinking dropped, history summarised, another conversation), or if the chat template
now renders the earlier messages differently, or the record has continued in another way, a new
record begins; the part it shares with another record is context there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import EpisodeError, shortened
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.data.chat_defaults import own_part
from tunesmith.learn.data.values import with_object_arguments
from tunesmith.learn.environments.base import Generate, Growing
from tunesmith.learn.environments.pictures import with_images, without_images
from tunesmith.learn.environments.rendering import NO_GUARD, ChatRenderer, Renderer
from tunesmith.learn.environments.token_guard import TokenGuard
from tunesmith.learn.environments.tools import BadCall, Parse, ToolCall, parser_for
from tunesmith.models.embedding_rows import without_row
from tunesmith.types import (
    Completion,
    Message,
    Record,
    Rollout,
    Task,
    Tokenizer,
    Tools,
    text_of_content,
)

TEXT = "text"
"""The key of a place after raw text; conversations of messages cannot continue from there."""


class OutOfRoom(EpisodeError):
    """The conversation has reached its limit of turns or tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings that all episodes of a run share."""

    renderer: Renderer
    prompt_of: Callable[[Task], list[Message]]
    """A task's prompt as the messages that its tokens represent."""
    section: EnvironmentSection
    max_tokens: int
    """Limit of a record, including the policy's tokens."""
    parse: Parse | None
    """Finds tool calls in the policy's text, if there are tools."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        prompt_of: Callable[[Task], list[Message]],
        section: EnvironmentSection,
        max_tokens: int,
    ) -> EpisodeSettings:
        """Episodes whose prompts go through the template, or are plain text without one."""
        guard = NO_GUARD
        if section.split_special_tokens:
            guard = TokenGuard.of(tokenizer, template.turns() if template else "")
        if template is None:
            return cls(Renderer(tokenizer, guard=guard), prompt_of, section, max_tokens, None)
        parse = parser_for(own_part(tokenizer.get_chat_template(tools=[])))
        return cls(ChatRenderer(template, guard), prompt_of, section, max_tokens, parse)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy."""

    message: Message
    """As a chat message, with any ``tool_calls``; cut before the request's stop string."""
    text: str
    """The same turn as plain text, without special tokens."""
    calls: list[ToolCall | BadCall]
    prompt_tokens: int
    completion: Completion
    prompt_ids: Sequence[int] = ()
    """The prompt, where ``prompt_scores`` were asked for."""
    prompt_scores: Sequence[tuple[float, Mapping[int, float]]] = ()
    """For each prompt token but the first: its log-probability, and the likeliest tokens in its
    place."""
    scores: Sequence[tuple[float, Mapping[int, float]]] = ()
    """The same of each token of the completion, where the likeliest were asked for."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a record from which the conversation can continue: after the prompt, or after a
    turn."""

    record: Record
    length: int
    key: tuple[str, ...]
    """The messages so far, for comparison."""
    messages: tuple[Message, ...]
    """The messages so far, for the chat template, with the policy's turns verbatim."""


@dataclass(slots=True)
class Conversation:
    """The policy's side of one episode; writes the rollout's records."""

    rollout: Rollout
    generate: Generate
    setting: EpisodeSettings
    prompt: Sequence[Message]
    """The content of the rollout's first record."""
    prompt_tools: Tools = None
    turns: int = 0
    failure: Exception | None = None
    """The engine's first error, which an agent may have hidden."""
    _writing: set[int] = field(default_factory=set[int])
    """``id`` of the records that the policy is writing to."""
    _places: list[_Place] = field(default_factory=list[_Place])

    def __post_init__(self) -> None:
        first = self.rollout.records[0]
        messages = tuple(map(for_template, self.prompt))
        key = _key(self.prompt, self.prompt_tools)
        self._places.append(_Place(first, len(first.token_ids), key, messages))

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        find_calls: bool = True,
        options: Mapping[str, object] | None = None,
        follow: Callable[[Growing], None] | None = None,
    ) -> Reply:
        """The policy's next turn after ``messages``. If it fails or is cancelled, the records are
        as before.

        Args:
            max_new_tokens: a limit for this turn, in addition to the run's.
            stop: strings that end this turn. The record keeps them; the reply is cut before them.
            find_calls: whether to parse tool calls in the turn, instead of leaving them as text.
            options: variables for the chat template, in addition to the run's.
            follow: see ``Generate``.

        Raises:
            OutOfRoom: ``max_turns`` or ``max_tokens`` is reached.
            EpisodeError: the messages cannot go through the chat template.
            EngineError: generation failed.
        """
        renderer = self.setting.renderer.with_options(options) if options else self.setting.renderer
        messages = with_images(renderer.tokenizer, messages)
        record, rendered = self._record_of(messages, tools, renderer, options)
        prompt_tokens = len(record.token_ids)
        completion = await self._sample(record, max_new_tokens, stop, follow)
        parse = self.setting.parse
        ids = completion.token_ids
        written = renderer.text(ids)
        raw = before_stop(written, stop)
        text = before_stop(renderer.plain(ids), stop)
        content, calls = parse(raw, text, tools) if parse and tools and find_calls else (text, [])
        if any(isinstance(call, BadCall) for call in calls):
            content = text  # keep the text of calls that cannot be read
        message = _assistant(content, calls, self.turns)
        shown = (*messages, message)
        rendered = (*rendered, {"role": "assistant", "content": written})
        key = _key(shown, tools, options)
        self._places.append(_Place(record, len(record.token_ids), key, rendered))
        self.rollout.messages = [without_images(m) for m in self._after_prompt(shown)]
        return Reply(message, text, calls, prompt_tokens, completion)

    async def continue_text(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        follow: Callable[[Growing], None] | None = None,
    ) -> Reply:
        """The policy's continuation of ``prompt``, which is raw text or token ids and skips the
        chat template.

        Raises:
            OutOfRoom, EngineError: as in ``reply``.
        """
        record = self._record_of_text(prompt)
        prompt_tokens = len(record.token_ids)
        completion = await self._sample(record, max_new_tokens, stop, follow)
        self._places.append(_Place(record, len(record.token_ids), (TEXT,), ()))
        text = before_stop(self.setting.renderer.plain(completion.token_ids), stop)
        return Reply({"role": "assistant", "content": text}, text, [], prompt_tokens, completion)

    def prompt_length(
        self, messages: Sequence[Message], tools: Tools, options: Mapping[str, object] | None
    ) -> int:
        """Tokens of a new conversation up to the policy's turn. Raises EpisodeError as ``reply``
        does."""
        renderer = self.setting.renderer.with_options(options) if options else self.setting.renderer
        messages = with_images(renderer.tokenizer, messages)
        return len(renderer.whole(self._for_template(messages, 0), tools))

    def pay(self, reward: float) -> None:
        """Add a reward to the last turn."""
        self._places[-1].record.pay(reward)

    def close(self) -> None:
        """Drop messages that the policy never answered, and put the record of the last turn
        last."""
        for record in self.rollout.records:
            if record.turns:
                record.cut(record.turns[-1].stop)
        last = self._places[-1].record
        records = [r for r in self.rollout.records if r.turns and r is not last]
        self.rollout.records = [*records, last]

    async def _sample(
        self,
        record: Record,
        max_new_tokens: int | None,
        stop: tuple[str, ...],
        follow: Callable[[Growing], None] | None,
    ) -> Completion:
        """Append the policy's next turn to a record; if there is none, the record is as before."""
        try:
            return await self._turn(record, max_new_tokens, stop, follow)
        except BaseException:
            self._take_back(record)
            raise

    def _take_back(self, record: Record) -> None:
        """Drop what a record was to be answered on, or the record if it has no turn."""
        first = self._places[0]
        if record.turns:
            record.cut(record.turns[-1].stop)
        elif record is first.record:
            record.cut(first.length)
        else:
            self.rollout.records = [one for one in self.rollout.records if one is not record]

    async def _turn(
        self,
        record: Record,
        max_new_tokens: int | None,
        stop: tuple[str, ...],
        follow: Callable[[Growing], None] | None,
    ) -> Completion:
        if self.turns >= self.setting.section.max_turns:
            turns = f"its {self.turns} turns (environment.max_turns)"
            raise OutOfRoom(f"the episode has reached {turns}")
        limit = self.setting.max_tokens
        room = limit - len(record.token_ids)
        if room < (0 if max_new_tokens == 0 else 1):
            full = f"the conversation has {len(record.token_ids)} tokens"
            limits = f"the limit is {limit} (environment.max_tokens)"
            raise OutOfRoom(f"{full} and leaves no room for a turn: {limits}")
        renderer = self.setting.renderer
        problem = without_row(renderer.tokenizer, renderer.words(record.token_ids))
        if problem:
            raise EpisodeError(problem)
        self.turns += 1
        self._writing.add(id(record))
        try:
            completion = await self.generate(
                record.token_ids,
                max_new_tokens=min(room, max_new_tokens or room),
                stop=stop,
                follow=follow,
            )
        except Exception as error:
            self.failure = self.failure or error
            raise
        finally:
            self._writing.discard(id(record))
        record.act(completion)
        return completion

    def _record_of_text(self, prompt: str | Sequence[int]) -> Record:
        """The record that ends with ``prompt``: continued if one holds its beginning, else a new
        one."""
        renderer = self.setting.renderer
        ends = renderer.end_ids

        def starts(ids: list[int]) -> bool:
            if isinstance(prompt, str):
                return prompt.startswith(renderer.verbatim(ids))
            return list(prompt[: len(ids)]) == ids

        matches: list[tuple[int, _Place]] = []
        for place in filter(lambda place: place.length, self._places):
            ids = place.record.token_ids[: place.length]
            # A client gets a turn without its end tokens, and so returns it without them.
            written = len(list(dropwhile(ends.__contains__, reversed(ids))))
            lengths = range(written, place.length + 1)
            matches += [(length, place) for length in lengths if starts(ids[:length])]
        if not matches:
            return self._begin(renderer.raw(prompt) if isinstance(prompt, str) else list(prompt))
        length, place = max(matches, key=lambda match: (match[0], self._is_open(match[1])))
        ids = place.record.token_ids[:length]
        if isinstance(prompt, str):
            rest = renderer.after(ids, prompt[len(renderer.verbatim(ids)) :])
        else:
            rest = list(prompt[length:])
        return self._continue(place, ids, rest)

    def _record_of(
        self,
        messages: Sequence[Message],
        tools: Tools,
        renderer: Renderer,
        options: Mapping[str, object] | None,
    ) -> tuple[Record, tuple[Message, ...]]:
        """The record, continued or new, that ends with ``messages``; and its messages for the chat
        template."""
        key = _key(messages, tools, options)
        held = [p for p in self._places if p.length and key[: len(p.key)] == p.key]
        if not held:
            rendered = self._for_template(messages, 0)
            return self._begin(renderer.whole(rendered, tools)), rendered
        # The longest; among equally long ones (the same conversation twice), one that can still be
        # appended to.
        place = max(held, key=lambda p: (len(p.key), self._is_open(p)))
        new = self._for_template(messages, len(place.messages))
        rendered = (*place.messages, *new)
        ids = place.record.token_ids[: place.length]
        rest = renderer.following(ids, place.messages, new, tools)
        if rest is None:
            return self._begin(renderer.whole(rendered, tools)), rendered
        return self._continue(place, ids, rest), rendered

    def _for_template(self, messages: Sequence[Message], start: int) -> tuple[Message, ...]:
        """The messages from ``start`` on as chat templates expect them, with special tokens in
        observations hidden.

        The task's own prompt and the assistant's turns keep theirs.
        """
        own = _key(messages[: len(self.prompt)], None) == _key(self.prompt, None)
        trusted = len(self.prompt) if own else 0
        cleaned: list[Message] = []
        for place, message in enumerate(map(for_template, messages[start:]), start):
            if place >= trusted and message.get("role") != "assistant":
                message["content"] = self.setting.renderer.guard.hide(message["content"])
            cleaned.append(message)
        return tuple(cleaned)

    def _continue(self, place: _Place, ids: list[int], rest: list[int]) -> Record:
        """The record that holds ``ids``, up to its ``place``, and then ``rest``: appended to, or a
        fork."""
        if len(ids) != place.length or not self._is_open(place):
            return self._begin([*ids, *rest])
        place.record.observe(rest)
        return place.record

    def _is_open(self, place: _Place) -> bool:
        """Whether the record can be appended to: it ends at this place, and the policy is not
        writing to it."""
        return len(place.record.token_ids) == place.length and id(place.record) not in self._writing

    def _begin(self, token_ids: list[int]) -> Record:
        record = Record()
        record.observe(token_ids)
        self.rollout.records.append(record)
        return record

    def _after_prompt(self, shown: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation without the prompt; from the first assistant turn if it began with
        another prompt."""
        start = len(self.prompt)
        if _key(shown[:start], None) == _key(self.prompt, None):
            return shown[start:]
        return tuple(dropwhile(lambda message: message["role"] != "assistant", shown))


def before_stop(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first stop string in it."""
    return re.split("|".join(map(re.escape, stop)), text, maxsplit=1)[0] if stop else text


def for_template(message: Message) -> Message:
    """A message as chat templates expect it: text content, arguments of tool calls as objects."""
    cleaned = {name: value for name, value in message.items() if value is not None}
    cleaned["content"] = text_of_content(message.get("content"))
    calls = cleaned.get("tool_calls") or ()
    listed = calls if isinstance(calls, list | tuple) else [calls]
    for call in listed:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            expected = "'tool_calls' is a list of calls with a 'function'"
            raise EpisodeError(f"{expected}, not {shortened(repr(call))}")
    if listed:
        cleaned["tool_calls"] = [with_object_arguments(call) for call in listed]
    return cleaned


def _assistant(content: str, calls: Sequence[ToolCall | BadCall], turn: int) -> Message:
    message: Message = {"role": "assistant", "content": content}
    for number, call in enumerate(calls):
        if isinstance(call, ToolCall):
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            written = {"id": f"call_{turn}_{number}", "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(written)
    return message


def _key(
    messages: Sequence[Message], tools: Tools, options: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """Everything that a rendering depends on, as comparable text; without names and ids, which
    agents may omit."""
    return (json.dumps([tools, options or {}], sort_keys=True), *map(_message_key, messages))


def _message_key(message: Message) -> str:
    normal = for_template(message)
    functions = [call["function"] for call in normal.get("tool_calls", ())]
    calls = [[function.get("name"), function.get("arguments")] for function in functions]
    images = [image.first for image in normal.get("images", ())]
    parts = [normal.get("role"), normal["content"], calls, images]
    return json.dumps(parts, sort_keys=True, default=str)
