"""Conversations rendered as text by the tokenizer's chat template, with the spans that the
assistant wrote.

A turn is learned exactly as it is sampled: after the context that the template renders before it,
from the end of the generation prompt to the end-of-turn token. A template may render an earlier
turn differently once the conversation continues (Qwen3 strips its thinking, Mistral moves the
system prompt). No single text can then hold both turns as they were sampled, so the conversation
becomes several texts, and each turn is learned once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, DataError, boundary, shortened
from tunesmith.learn.data.chat_checks import PROBE, check_options, with_probes
from tunesmith.learn.data.chat_defaults import own_part
from tunesmith.learn.data.images import IMAGE_MARK, with_parts
from tunesmith.learn.data.tokens import Span
from tunesmith.learn.data.trie import common_length
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.types import Message, Tokenizer, Tools

OPENING = 40
"""A turn's content may repeat up to this many characters from the end of the generation prompt."""
MOST_TURNS = 500
"""Maximum number of learned assistant turns per conversation; the work is quadratic in it."""
REMEDY = (
    "Name a template with {% generation %} tags with model.chat_template, or give prompt and "
    "completion as text with data.chat = false"
)
HERMES = Path(__file__).with_name("templates") / "hermes.jinja"
"""ChatML with tools, in the notation of the Hermes models; ``model.chat_template = "hermes"``."""
NO_TEMPLATE = "name a file with model.chat_template, or set data.chat = false"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the learned spans in order."""

    text: str
    spans: tuple[Span, ...]


def is_learned(message: Message) -> bool:
    """Whether a message is the assistant's and does not have ``weight`` 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template and its properties."""

    tokenizer: Tokenizer
    marks_assistant: bool
    """The template marks the assistant's text with ``{% generation %}``."""
    has_generation_prompt: bool
    takes_tools: bool
    special: tuple[str, ...]
    """Every special token's text, longest first."""
    options: Mapping[str, Any]
    """Variables that every rendering sets."""
    turn_end: str | None
    """The text after the content of a final assistant turn; None if it could not be determined."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of ``tokenizer``; ConfigError if it has none, or one that is no Jinja."""
        if not tokenizer.chat_template:
            raise ConfigError(f"this tokenizer has no chat template: {NO_TEMPLATE}")
        source = own_part(tokenizer.get_chat_template())
        with_tools = own_part(tokenizer.get_chat_template(tools=[]))
        special = {token for token in tokenizer.all_special_tokens if token}
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special |= {token.content for token in added.values() if token.special}
        template = cls(
            tokenizer,
            marks_assistant=_GENERATION.search(source) is not None,
            has_generation_prompt="add_generation_prompt" in source,
            takes_tools="tools" in with_tools,
            special=tuple(sorted(special, key=lambda token: (-len(token), token))),
            options={},
            turn_end=None,
        )
        try:
            asked = {"role": "user", "content": "x"}
            text = template.render([asked, {"role": "assistant", "content": PROBE}])
        except DataError as refusal:
            line = getattr(refusal.__cause__, "lineno", None)
            if line is not None:  # jinja2's TemplateSyntaxError
                problem = f"the chat template is no Jinja, line {line}: {refusal.__cause__}"
                raise ConfigError(problem, keys=("model.chat_template",)) from refusal
            return template
        return replace(template, turn_end=text.rsplit(PROBE, 1)[1] if PROBE in text else None)

    def with_options(self, options: Mapping[str, object]) -> ChatTemplate:
        """The template with additional variables; ConfigError for one that it does not read."""
        source = own_part(self.tokenizer.get_chat_template())
        check_options(options, source, self.tokenizer.special_tokens_map)
        return replace(self, options={**self.options, **options})

    def render(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False
    ) -> str:
        """The conversation as text; with ``prompt``, up to the start of the assistant's turn.

        Raises:
            DataError: the template refuses the conversation or does not render tools.
        """
        if tools and not self.takes_tools:
            name = "name one that has with model.chat_template, such as 'hermes' for ChatML models"
            raise DataError(f"the chat template has no place for tools: {name}")
        with _refusal(messages):
            text = self.tokenizer.apply_chat_template(
                list(map(with_parts, messages)),
                tools,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.options,
            )
        return self._with_images(text)

    def _with_images(self, text: str) -> str:
        """The template's text with what a processor writes in the place of each image."""
        vocabulary = vocabulary_of(self.tokenizer)
        return text if vocabulary is None else vocabulary.rendered(text)

    def whole(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False
    ) -> str:
        """``render``, but with a DataError if the text lacks part of a message.

        The assistant's thinking may be missing: many templates deliberately drop it from earlier
        turns.
        """
        text = self.render(messages, tools, prompt=prompt)
        self._check_kept(messages, text, tools, prompt=prompt)
        return text

    def _check_kept(
        self, messages: Sequence[Message], text: str, tools: Tools, *, prompt: bool
    ) -> None:
        squashed = _squash(text)
        place = 0
        pieces = (
            (number, message["role"], message, _squash(piece))
            for number, message in enumerate(messages, 1)
            for piece in message["content"].split(IMAGE_MARK)
        )
        for number, role, message, content in pieces:
            if role not in ("system", "developer", "user"):
                continue
            # in order, except for messages that a template moves
            start = squashed.find(content, place)
            if start >= 0:
                place = start + len(content)
            elif content not in squashed:
                raise DataError(
                    f"the chat template leaves out message {number} ({role}: "
                    f"{_short(message['content'])}); put it into another message, or name another "
                    "template with model.chat_template"
                )
        self._check_parts(messages, tools, prompt=prompt)

    def _check_parts(
        self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False, turn: bool = False
    ) -> None:
        """Check with probes that the text contains tool calls, tools' answers and names; DataError
        if not.

        With ``turn`` it checks only the last message, including its thinking: the turn to learn.
        """
        probed, probes = with_probes(messages, turn=turn)
        try:
            text = self.render(probed, tools, prompt=prompt) if probes else ""
        except DataError:  # the template rejects the probes
            return
        for probe, (number, what) in probes.items():
            if probe not in text:
                raise DataError(
                    f"the chat template leaves out {what} of message {number} "
                    f"({messages[number - 1]['role']}); name a template that writes it with "
                    "model.chat_template, or put it into the message's content"
                )

    def turns(self) -> str:
        """A short conversation as text: the markers of turns, if the template renders it."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        with suppress(DataError):
            return self.render(messages, prompt=True)
        return ""

    @property
    def stop_marker(self) -> str:
        """The learned part of ``turn_end``: up to its first special token, or up to the tokenizer's
        EOS if only special tokens lie between the two (Cohere ends the answer and then the turn);
        all of it if it has no special token."""
        return next(iter(self._learned_ends), self.turn_end or "")

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """The texts with which the policy may have ended a turn, longest first: ``stop_marker``, or
        its beginning up to a special token."""
        return tuple(end.strip() for end in self._learned_ends)

    @property
    def _learned_ends(self) -> list[str]:
        """The beginnings of ``turn_end`` up to each special token of ``stop_marker``, longest
        first."""
        tail = self.turn_end or ""
        rest = tail.lstrip()
        eos = str(self.tokenizer.special_tokens_map.get("eos_token", ""))
        ends: list[str] = []
        while token := next((token for token in self.special if rest.startswith(token)), ""):
            rest = rest[len(token) :]
            ends.append(tail[: len(tail) - len(rest)])
            if token == eos:
                return ends[::-1]
        return ends[:1]

    @property
    def ends_turns(self) -> bool:
        """Whether a special token ends the assistant's turn, so that the policy learns to stop."""
        return self.stop_marker.lstrip().startswith(self.special)

    def check_system(self) -> None:
        """Raise ConfigError if the template refuses or drops a system message."""
        messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "x"}]
        try:
            self.whole(messages, prompt=True)
        except DataError as error:
            raise ConfigError(
                f"system messages (data.system_prompt) do not work here: {error}",
                keys=("data.system_prompt",),
            ) from error

    def learned(
        self, messages: Sequence[Message], tools: Tools = None, first: int = 0
    ) -> list[Rendered]:
        """Texts in which each assistant turn from message ``first`` on is learned exactly once.

        Returns one text if the template renders earlier turns unchanged, else several.

        Raises:
            DataError: the assistant's text in a turn cannot be determined from the rendering.
        """
        turns = [i for i in range(first, len(messages)) if is_learned(messages[i])]
        if len(turns) > MOST_TURNS:
            raise DataError(
                f"the conversation has {len(turns)} assistant turns, each rendered with all "
                f"messages before it: at most {MOST_TURNS} can be learned; split it into several "
                "conversations"
            )
        own = {i: self._turn(messages[: i + 1], tools) for i in turns}
        if turns:
            self._check_kept(messages[: turns[-1]], own[turns[-1]].text, tools, prompt=True)
        texts: list[Rendered] = []
        while turns:
            text = own[turns[-1]].text
            held = [i for i in turns if text.startswith(own[i].text[: own[i].spans[-1][1]])]
            texts.append(Rendered(text, tuple(span for i in held for span in own[i].spans)))
            turns = [i for i in turns if i not in held]
        return texts[::-1]

    def up_to_the_end(self, text: Rendered) -> Rendered:
        """A text whose last turn is the assistant's, with its last span up to the end of that turn,
        wherever ``{% generation %}`` tags end."""
        if self.turn_end is None or not text.text.endswith(self.turn_end):
            return text
        end = len(text.text) - len(self.turn_end) + len(self.stop_marker)
        *before, (start, _) = text.spans
        return Rendered(text.text, (*before, (start, end)))

    def _turn(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """A conversation that ends with an assistant turn, with the spans of that turn only."""
        render = self._marked_turn if self.marks_assistant else self._sampled_turn
        rendered = render(messages, tools)
        written = "".join(rendered.text[a:b] for a, b in rendered.spans)
        content = messages[-1]["content"]
        before = rendered.text[: rendered.spans[0][0]]
        if not _holds(_squash(written), _squash(content), _squash(before[-2 * OPENING :])):
            raise DataError(
                "the chat template changes or drops part of the assistant's turn in message "
                f"{len(messages)}: {_short(content)} became {_short(written)}. {REMEDY}"
            )
        self._check_parts(messages, tools, turn=True)
        return rendered

    def _sampled_turn(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """The turn's span from the end of the generation prompt to the end-of-turn token."""
        if len(messages) == 1:
            raise DataError("the conversation begins with the assistant, whose turn has no prompt")
        before = self.render(messages[:-1], tools, prompt=True)
        text = self.render(messages, tools)
        number = len(messages)
        if not text.startswith(before):
            same = common_length(before, text)
            opened = self._open(before, before[same:].strip(), messages[-1])
            if opened is not None:
                return opened
            raise DataError(
                f"the chat template renders the assistant's turn in message {number} as "
                f"{_short(text[same:])}, but the model continues after {_short(before[same:])}: "
                f"begin the turn's content with that. {REMEDY}"
            )
        written = text[len(before) :].lstrip()
        content = messages[-1]["content"].strip()
        if not self.has_generation_prompt and not written.startswith(content[:20]):
            raise DataError(
                "the chat template has no generation prompt but writes a header before the "
                f"assistant's turn in message {number} ({_short(written)}). Name one that uses "
                "add_generation_prompt with model.chat_template"
            )
        return Rendered(text, ((len(before), self._end_of_turn(text, number)),))

    def _open(self, before: str, opening: str, message: Message) -> Rendered | None:
        """The text as sampled of a turn whose content begins with the end of the generation prompt
        (DeepSeek's ``<think>``), which the template drops from the turn; None if this is not the
        case."""
        content = message["content"].lstrip()
        begins = opening and content.startswith(opening) and not message.get("tool_calls")
        if not begins or self.turn_end is None:
            return None
        text = before + content[len(opening) :].lstrip()
        end = len(text) + len(self.stop_marker)
        return Rendered(text + self.turn_end, ((len(before), end),))

    def _end_of_turn(self, text: str, number: int) -> int:
        """The end of the assistant's text in the final turn of ``text``."""
        if self.turn_end is not None and text.endswith(self.turn_end):
            return len(text) - len(self.turn_end) + len(self.stop_marker)
        body = text.rstrip()
        if body.endswith(self.special):
            return len(body)
        unknown = f"the end of the assistant's turn in message {number} cannot be determined"
        raise DataError(f"{unknown} ({_short(text[-40:])}). {REMEDY}")

    def _marked_turn(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """The turn's spans according to the template's ``{% generation %}`` tags."""
        from transformers.utils import chat_template_utils

        before = self.render(messages[:-1], tools) if len(messages) > 1 else ""
        with _refusal(messages):
            rendered: Any = chat_template_utils.render_jinja_template(
                conversations=[list(map(with_parts, messages))],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )
        raw = rendered[0][0]
        text = self._with_images(raw)
        same = common_length(before, text)
        marked = [[len(self._with_images(raw[:end])) for end in span] for span in rendered[1][0]]
        spans = tuple((a, b) for a, b in marked if a >= same and b > a)
        if not spans:
            raise DataError(
                "the chat template's {% generation %} tags do not mark the assistant's turn in "
                f"message {len(messages)}; correct them, or name another template with "
                "model.chat_template"
            )
        return Rendered(text, spans)


def _holds(written: str, content: str, before: str) -> bool:
    """Whether ``written`` contains all of ``content``, or the rest of it after a part at the end of
    the generation prompt ``before``. All arguments are without white space."""
    lengths = range(min(len(content), OPENING), 0, -1)
    repeated = (length for length in lengths if before.endswith(content[:length]))
    return content in written or any(written.startswith(content[n:]) for n in repeated)


def end_of_turn_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an assistant's turn in the chat template; none if there is no template or
    no such token."""
    if not tokenizer.chat_template:
        return []
    template = ChatTemplate.of(tokenizer)
    if not template.ends_turns:
        return []
    return tokenizer(template.stop_marker.strip(), add_special_tokens=False)["input_ids"]


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The last of ``end_of_turn_ids``, at which engines must stop even if the tokenizer's EOS is
    another token."""
    return next(reversed(end_of_turn_ids(tokenizer)), None)


def _refusal(messages: Sequence[Message]) -> AbstractContextManager[None]:
    """Turn any exception of a template into a DataError."""
    roles = ", ".join(str(message.get("role")) for message in messages[:6])
    return boundary(DataError, f"the chat template refuses this conversation ({roles})", Exception)


def _squash(text: str) -> str:
    return "".join(text.split())


def _short(text: str) -> str:
    return repr(shortened(text, 60))
