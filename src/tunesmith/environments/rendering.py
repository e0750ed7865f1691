"""Conversations as tokens: whole, or only what follows what is there already.

Nothing the policy wrote is ever tokenized. What comes after it is found by rendering the longer conversation
and taking what stands behind the text that the tokens already say. A template that renders earlier turns
differently once the conversation goes on (Qwen3 drops their thinking) gives no such continuation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from tunesmith.data.chat import ChatTemplate
from tunesmith.data.tokens import Tokenizer, decode, encode, encode_after, leading_ids, with_leading
from tunesmith.errors import ConfigError, DataError, EpisodeError, boundary
from tunesmith.types import Message

TAIL = 16
"""Tokens of what is there that are looked at when text is put behind them."""

Tools = list[dict[str, Any]] | None
"""JSON schemas, as chat templates take them."""


class Renderer:
    """Conversations as tokens with a tokenizer; ``ends`` is what may end the policy's turn, as text."""

    def __init__(self, tokenizer: Tokenizer, ends: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self._ends = tuple(end for end in ends if end)

    @property
    def end_ids(self) -> set[int]:
        """Tokens that end the policy's turn."""
        encoded = encode(self.tokenizer, list(self._ends))
        return {ids[0] for ids in encoded if len(ids) == 1}

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a conversation up to where the policy writes."""
        raise NotImplementedError

    def with_options(self, options: Mapping[str, Any]) -> Renderer:
        """The renderer whose chat template has these variables set as well; an EpisodeError where it reads none."""
        raise EpisodeError(f"there is no chat template to read {', '.join(options)} (chat_template_kwargs)")

    def following(
        self, token_ids: Sequence[int], said: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """What to append to ``token_ids``, which say ``said``, so that the policy answers ``new``.

        None where that is rendered differently from ``token_ids``.
        """
        raise NotImplementedError

    def text(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, as later renderings have it: without the token that ends its turn."""
        text = decode(self.tokenizer, token_ids)
        return text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))

    def decoded(self, token_ids: Sequence[int]) -> str:
        """All that the tokens say, special tokens included."""
        return decode(self.tokenizer, token_ids)

    def raw(self, text: str) -> list[int]:
        """Tokens of a text that skips the chat template."""
        return with_leading(leading_ids(self.tokenizer), encode(self.tokenizer, [text])[0])

    def after(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Tokens of ``text`` as it stands behind ``token_ids``."""
        return encode_after(self.tokenizer, decode(self.tokenizer, token_ids[-TAIL:]), text) if text else []

    def plain(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class ChatRenderer(Renderer):
    """Through the tokenizer's chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template.tokenizer, (template.stop_marker.strip(), _eos(template.tokenizer)))
        self.template = template

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return encode(self.tokenizer, [self._render(messages, tools)])[0]

    def following(
        self, token_ids: Sequence[int], said: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        if not new:
            return []
        there = decode(self.tokenizer, token_ids)
        rest = behind(there, self._render([*said, *new], tools))
        return None if rest is None else encode_after(self.tokenizer, decode(self.tokenizer, token_ids[-1:]), rest)

    def with_options(self, options: Mapping[str, Any]) -> Renderer:
        with boundary(EpisodeError, "chat_template_kwargs", Exception):
            try:
                return ChatRenderer(self.template.with_options(options))
            except ConfigError as error:  # one request was wrong, not the run
                raise EpisodeError(str(error)) from error

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        with boundary(EpisodeError, "this conversation cannot go through the chat template", Exception):
            try:
                return self.template.render(messages, tools, prompt=True)
            except DataError as error:  # one line of data was not wrong here, one episode is
                raise EpisodeError(str(error)) from error


class PlainRenderer(Renderer):
    """Text put behind text: for models without a chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, (_eos(tokenizer),))

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        assert not tools, "tools need a chat template"
        return self.raw(_joined(messages))

    def following(
        self, token_ids: Sequence[int], said: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        del said, tools
        return self.after(token_ids, _joined(new))


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _eos(tokenizer: Tokenizer) -> str:
    return "" if tokenizer.eos_token_id is None else str(tokenizer.decode([tokenizer.eos_token_id]))


def behind(there: str, full: str) -> str | None:
    """What of ``full`` stands behind ``there``, blanks aside; None where ``full`` does not begin with it.

    Templates trim what was written. A blank too many or too few does not make another conversation of it.
    """
    if full.startswith(there):
        return full[len(there) :]
    squashed = "".join(there.split())
    if not squashed or not "".join(full.split()).startswith(squashed):
        return None
    solid = (place for place, character in enumerate(full, 1) if not character.isspace())
    rest = full[next(islice(solid, len(squashed) - 1, None)) :]
    blanks = "".join(takewhile(str.isspace, reversed(there)))[::-1]
    return rest.removeprefix(blanks)
