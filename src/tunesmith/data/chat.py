"""Conversations to text through the tokenizer's chat template, and which characters the assistant wrote.

A turn is learned exactly as it would be sampled: in the context that the template renders before it, from the
end of the generation prompt to the end-of-turn token. Where a template renders an earlier turn differently
once the conversation goes on (Qwen3 strips its thinking, Mistral moves the system prompt), one text cannot
hold both turns as they were sampled, so the conversation becomes several texts, each turn learned once.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.data.chat_checks import PROBE, check_options, options_of, with_probes
from tunesmith.data.tokens import Span, Tokenizer
from tunesmith.data.trie import common_length
from tunesmith.errors import ConfigError, DataError
from tunesmith.types import Message

OPENING = 40
"""Characters at the end of a generation prompt with which a turn's content may begin."""
MOST_TURNS = 500
"""Assistant turns of one conversation that are learned; the work grows with their square."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the spans of it that are learned, in order."""

    text: str
    spans: tuple[Span, ...]


def is_learned(message: Message) -> bool:
    """Whether a message is an assistant's, and not left out by a ``weight`` of 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template and what was found out about it by rendering probes."""

    tokenizer: Tokenizer
    marks_assistant: bool
    """The template says itself what the assistant writes, by ``{% generation %}``."""
    has_generation_prompt: bool
    takes_tools: bool
    special: tuple[str, ...]
    """Every special token's text, longest first."""
    options: Mapping[str, Any]
    """``data.chat_template_kwargs``: variables that every rendering sets."""
    turn_end: str | None
    """What stands after an assistant's content when the turn is the last; None if it was not found."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Probe the template of ``tokenizer``; a ConfigError where it has none, or no use for its ``options_of``."""
        if not tokenizer.chat_template:
            raise ConfigError(
                "this tokenizer has no chat template. Name a template file with model.chat_template, or "
                "train on text prompts with data.chat = false."
            )
        source = tokenizer.get_chat_template()
        special = {token for token in tokenizer.all_special_tokens if token}
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special |= {token.content for token in added.values() if token.special}
        plain = cls(
            tokenizer,
            marks_assistant=_GENERATION.search(source) is not None,
            has_generation_prompt="add_generation_prompt" in source,
            takes_tools="tools" in source,
            special=tuple(sorted(special, key=lambda token: (-len(token), token))),
            options=check_options(options_of(tokenizer), source, tokenizer.special_tokens_map),
            turn_end=None,
        )
        return replace(plain, turn_end=plain.probe_turn_end())

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The template with further variables set; a ConfigError for one that it does not read."""
        check_options(options, self.tokenizer.get_chat_template(), self.tokenizer.special_tokens_map)
        return replace(self, options={**self.options, **options})

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The conversation as text; with ``prompt``, up to where the assistant begins to write.

        Raises:
            DataError: the template refuses the conversation, or has no place for the tools.
        """
        if tools and not self.takes_tools:
            raise DataError("the chat template has no place for tools; name one that has with model.chat_template")
        with self._refusing(messages):
            return self.tokenizer.apply_chat_template(
                list(messages), tools, add_generation_prompt=prompt, tokenize=False, **self.options
            )

    @contextmanager
    def _refusing(self, messages: Sequence[Message]) -> Generator[None]:
        """A template may raise anything, on purpose or by accident: a DataError."""
        try:
            yield
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:6])
            raise DataError(f"the chat template refuses this conversation ({roles}): {error}") from error

    def whole(self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """As ``render``, and a DataError where something that a message says is lost.

        What the assistant thought may be: many templates leave out the thinking of earlier turns on purpose.
        """
        text = self.render(messages, tools, prompt=prompt)
        self._check_kept(messages, text, tools, prompt=prompt)
        return text

    def _check_kept(self, messages: Sequence[Message], text: str, tools: list[Any] | None, *, prompt: bool) -> None:
        squashed, place = _squash(text), 0
        for number, message in enumerate(messages, 1):
            said, role = _squash(message["content"]), message["role"]
            if role not in ("system", "developer", "user"):
                continue
            found = squashed.find(said, place)  # messages stand in their order, but for what a template moves
            if found < 0 and said not in squashed:
                raise DataError(
                    f"the chat template leaves out message {number} ({role}: {_short(message['content'])}); put it "
                    "into another message, or name another template with model.chat_template"
                )
            place = found + len(said) if found >= 0 else place
        self._check_parts(messages, tools, prompt=prompt)

    def _check_parts(
        self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False, turn: bool = False
    ) -> None:
        """A DataError where tool calls, tools' answers or names leave no trace in the text.

        Each is told by a probe put into it. Only of the last message, with its thinking, where that is the ``turn``
        to be learned.
        """
        probed, probes = with_probes(messages, turn=turn)
        if not probes:
            return
        try:
            text = self.render(probed, tools, prompt=prompt)
        except DataError:  # it looks so closely that it does not take the probe for what it stands for
            return
        for probe, (number, what) in probes.items():
            if probe not in text:
                raise DataError(
                    f"the chat template leaves out {what} of message {number} ({messages[number - 1]['role']}); name "
                    "a template that writes it with model.chat_template, or put it into the message's content"
                )

    def probe_turn_end(self) -> str | None:
        """What the template writes after the content of a last assistant turn."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
        try:
            text = self.render(messages)
        except DataError:
            return None
        return text.rsplit(PROBE, 1)[1] if PROBE in text else None

    @property
    def stop_marker(self) -> str:
        """What of ``turn_end`` is learned: blanks and the first special token, and what follows it at once up to the
        tokenizer's EOS (Cohere ends the answer and then the turn); all of it if it has no special token."""
        tail = self.turn_end or ""
        rest = tail.lstrip()
        eos = str(self.tokenizer.special_tokens_map.get("eos_token", ""))
        ends: list[int] = []
        while token := next((token for token in self.special if rest.startswith(token)), ""):
            rest = rest[len(token) :]
            ends.append(len(tail) - len(rest))
            if token == eos:
                return tail[: ends[-1]]
        return tail[: ends[0]] if ends else tail

    @property
    def ends_turns(self) -> bool:
        """Whether a special token ends the assistant's turn, so that a policy can learn to stop."""
        return self.stop_marker.lstrip().startswith(self.special)

    def check_system(self) -> None:
        """Refuse (ConfigError) a template that refuses a system message, or leaves it out without a word."""
        messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "x"}]
        try:
            self.whole(messages, prompt=True)
        except DataError as error:
            raise ConfigError(
                f"system messages (data.system_prompt) do not work with this tokenizer: {error}."
            ) from error

    def learned(self, messages: Sequence[Message], tools: list[Any] | None = None, first: int = 0) -> list[Rendered]:
        """Texts in which each assistant turn from message ``first`` on is learned exactly once.

        One text, where the template renders earlier turns as they were; more, where it does not.

        Raises:
            DataError: the template renders a turn so that it cannot be told what the assistant wrote.
        """
        turns = [i for i in range(first, len(messages)) if is_learned(messages[i])]
        if len(turns) > MOST_TURNS:
            raise DataError(
                f"the conversation has {len(turns)} assistant turns, each rendered with all that came before it: "
                f"at most {MOST_TURNS} can be learned; make several conversations of it"
            )
        own = {i: self._turn(messages[: i + 1], tools) for i in turns}
        if turns:
            self._check_kept(messages[: turns[-1]], own[turns[-1]].text, tools, prompt=True)
        made: list[Rendered] = []
        while turns:
            text = own[turns[-1]].text
            held = [i for i in turns if text.startswith(own[i].text[: own[i].spans[-1][1]])]
            made.append(Rendered(text, tuple(span for i in held for span in own[i].spans)))
            turns = [i for i in turns if i not in held]
        return made[::-1]

    def _turn(self, messages: Sequence[Message], tools: list[Any] | None) -> Rendered:
        """A conversation that ends with an assistant turn, with the spans of that turn alone."""
        rendered = self._marked(messages, tools) if self.marks_assistant else self._found(messages, tools)
        written = "".join(rendered.text[a:b] for a, b in rendered.spans)
        content, before = messages[-1]["content"], rendered.text[: rendered.spans[0][0]]
        if not _holds(_squash(written), _squash(content), _squash(before[-2 * OPENING :])):
            raise DataError(
                f"the chat template changes or drops part of the assistant's turn in message "
                f"{len(messages)}: {_short(content)} became {_short(written)}. Name a template that keeps "
                "it with model.chat_template, or give prompt and completion as text with data.chat = false"
            )
        self._check_parts(messages, tools, turn=True)
        return rendered

    def _found(self, messages: Sequence[Message], tools: list[Any] | None) -> Rendered:
        """The turn's span from rendering: after the generation prompt, up to the end-of-turn token."""
        if len(messages) == 1:
            raise DataError("the conversation begins with the assistant, so nothing asks for that turn")
        before = self.render(messages[:-1], tools, prompt=True)
        text = self.render(messages, tools)
        number = len(messages)
        if not text.startswith(before):
            same = common_length(before, text)
            if (opened := self._opened(before, before[same:].strip(), messages[-1])) is not None:
                return opened
            raise DataError(
                f"the chat template renders the assistant's turn in message {number} as "
                f"{_short(text[same:])}, but asks the model to continue after {_short(before[same:])}: what "
                "would be learned is not what is sampled. Begin the turn's content with that, name a template with "
                "{% generation %} tags with model.chat_template, or give prompt and completion as text with "
                "data.chat = false"
            )
        written = text[len(before) :].lstrip()
        content = messages[-1]["content"].strip()
        if not self.has_generation_prompt and not written.startswith(content[:20]):
            raise DataError(
                "the chat template has no generation prompt, yet writes a header before the assistant's turn "
                f"in message {number} ({_short(written)}). Name a template that uses add_generation_prompt "
                "with model.chat_template"
            )
        return Rendered(text, ((len(before), self._end_of_turn(text, number)),))

    def _opened(self, before: str, opening: str, message: Message) -> Rendered | None:
        """A turn whose content begins with what the generation prompt ends with (DeepSeek's ``<think>``), where the
        template leaves that out of what it renders: as it is sampled, behind the generation prompt."""
        content = message["content"].lstrip()
        if not opening or not content.startswith(opening) or self.turn_end is None or message.get("tool_calls"):
            return None
        text = before + content[len(opening) :].lstrip() + self.turn_end
        return Rendered(text, ((len(before), len(text) - len(self.turn_end) + len(self.stop_marker)),))

    def _end_of_turn(self, text: str, number: int) -> int:
        """Where the turn that ends ``text`` stops being the assistant's writing."""
        if self.turn_end is not None and text.endswith(self.turn_end):
            return len(text) - len(self.turn_end) + len(self.stop_marker)
        body = text.rstrip()
        if body.endswith(self.special):
            return len(body)
        raise DataError(
            f"the chat template ends the assistant's turn in message {number} in a way of its own "
            f"({_short(text[-40:])}), so it cannot be told where the turn ends. Name a template with "
            "{% generation %} tags with model.chat_template"
        )

    def _marked(self, messages: Sequence[Message], tools: list[Any] | None) -> Rendered:
        """The turn's spans as the template's ``{% generation %}`` tags mark them."""
        from transformers.utils import chat_template_utils

        before = self.render(messages[:-1], tools) if len(messages) > 1 else ""
        with self._refusing(messages):
            made: Any = chat_template_utils.render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )
        text, marks = made[0][0], made[1][0]
        same = common_length(before, text)
        spans = tuple((a, b) for a, b in marks if a >= same and b > a)
        if not spans:
            raise DataError(
                f"the chat template's {{% generation %}} tags do not mark the assistant's turn in message "
                f"{len(messages)}"
            )
        return Rendered(text, spans)


def _holds(written: str, content: str, before: str) -> bool:
    """Whether a turn says ``content``: ``written`` has all of it, or goes on with it where the generation prompt, which
    ends with ``before``, has begun it. All without blanks."""
    return content in written or any(
        before.endswith(content[:length]) and written.startswith(content[length:])
        for length in range(min(len(content), OPENING), 0, -1)
    )


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The token that ends an assistant's turn in this tokenizer's chat template, if it writes one.

    An engine has to stop there, whatever the tokenizer calls its EOS.
    """
    if not tokenizer.chat_template:
        return None
    template = ChatTemplate.of(tokenizer)
    if not template.ends_turns:
        return None
    ids: list[int] = tokenizer(template.stop_marker.strip(), add_special_tokens=False)["input_ids"]
    return ids[-1] if ids else None


def _squash(text: str) -> str:
    return "".join(text.split())


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57]) + "..."
