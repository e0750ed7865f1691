"""Conversations as tokens: whole, or only the continuation of existing tokens.

The policy's own text is never retokenized. The text after it is determined by rendering the longer
conversation and removing the text of the existing tokens. If a template renders earlier turns
differently once the conversation continues (Qwen3 drops their thinking), no continuation exists.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile

from tunesmith.errors import ConfigError, DataError, EpisodeError, boundary
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.data.tokens import decode, encode, leading_ids, with_leading
from tunesmith.learn.environments.pictures import images_of
from tunesmith.learn.environments.token_guard import TokenGuard
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.types import Message, Tokenizer, Tools

TAIL = 16
"""Existing tokens that are decoded as context when text is appended to them."""

NO_GUARD = TokenGuard()


class Renderer:
    """Concatenates the messages' text, for models without a chat template.

    Args:
        ends: texts that end the policy's turn, besides the tokenizer's end of sequence; longer ones
            first.
        guard: hides special tokens in observations; messages come with them hidden.
    """

    def __init__(
        self, tokenizer: Tokenizer, ends: tuple[str, ...] = (), guard: TokenGuard = NO_GUARD
    ) -> None:
        self.tokenizer = tokenizer
        self.guard = guard
        eos = tokenizer.eos_token_id
        ends = (*ends, "" if eos is None else str(tokenizer.decode([eos])))
        self._ends = tuple(text for text in ends if text)

    @property
    def end_ids(self) -> set[int]:
        """Tokens that end the policy's turn."""
        return {ids[0] for ids in encode(self.tokenizer, list(self._ends)) if len(ids) == 1}

    def words(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens as the tokenizer knows them: without the rows of images.

        Raises:
            EpisodeError: there are rows of images that were never shown.
        """
        vocabulary = vocabulary_of(self.tokenizer)
        if vocabulary is None:
            return list(token_ids)
        with _of_episode():
            return vocabulary.shown(token_ids)

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a conversation up to the start of the policy's turn."""
        assert not tools, "tools need a chat template"
        return self.raw(_join(messages))

    def with_options(self, options: Mapping[str, object]) -> Renderer:
        """The renderer with further variables of its chat template; an EpisodeError if there is no
        chat template."""
        raise EpisodeError(
            f"there is no chat template to read {', '.join(options)} (chat_template_kwargs)"
        )

    def following(
        self,
        token_ids: Sequence[int],
        earlier: Sequence[Message],
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        """Tokens to append to ``token_ids``, the rendering of ``earlier``, so that the policy
        answers ``new``.

        None if ``earlier`` is now rendered differently.
        """
        del earlier, tools
        return self.after(token_ids, _join(new))

    def text(self, token_ids: Sequence[int]) -> str:
        """The policy's text as in later renderings: without the token that ends its turn."""
        text = decode(self.tokenizer, token_ids)
        return text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))

    def verbatim(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, including special tokens."""
        return decode(self.tokenizer, self.words(token_ids))

    def raw(self, text: str) -> list[int]:
        """Tokens of a text that skips the chat template."""
        return with_leading(leading_ids(self.tokenizer), self.guard.encode(self.tokenizer, text))

    def after(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Tokens of ``text`` as a continuation of ``token_ids``."""
        tail = decode(self.tokenizer, self.words(token_ids)[-TAIL:])
        return self.guard.encode_after(self.tokenizer, tail, text)

    def plain(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class ChatRenderer(Renderer):
    """Renders through the tokenizer's chat template."""

    def __init__(self, template: ChatTemplate, guard: TokenGuard = NO_GUARD) -> None:
        super().__init__(template.tokenizer, template.turn_ends, guard)
        self.template = template

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        ids = self.guard.encode(self.tokenizer, self._render(messages, tools))
        return self._with_rows(ids, messages)

    def following(
        self,
        token_ids: Sequence[int],
        earlier: Sequence[Message],
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        if not new:
            return []
        hidden = self._render([*earlier, *new], tools)
        rest = behind(self.verbatim(token_ids), self.guard.reveal(hidden))
        if rest is None:
            return None
        last = decode(self.tokenizer, token_ids[-1:])
        tail = self.guard.tail(hidden, len(rest))
        return self._with_rows(self.guard.encode_after(self.tokenizer, last, tail), new)

    def _with_rows(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Tokens with the rows of the messages' images in their places."""
        vocabulary = vocabulary_of(self.tokenizer)
        if vocabulary is None:
            return token_ids
        with _of_episode():
            return vocabulary.expanded(token_ids, images_of(messages))[0]

    def with_options(self, options: Mapping[str, object]) -> Renderer:
        with boundary(EpisodeError, "chat_template_kwargs", Exception):
            try:
                return ChatRenderer(self.template.with_options(options), self.guard)
            except ConfigError as error:  # the request is wrong, not the run
                raise EpisodeError(str(error)) from error

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        refused = "this conversation cannot go through the chat template"
        with boundary(EpisodeError, refused, Exception), _of_episode():
            return self.template.render(messages, tools, prompt=True)


@contextmanager
def _of_episode() -> Generator[None]:
    """The episode is wrong, not a line of data."""
    try:
        yield
    except DataError as error:
        raise EpisodeError(str(error)) from error


def _join(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def behind(existing: str, full: str) -> str | None:
    """The rest of ``full`` after ``existing``, ignoring white space; None if ``full`` does not
    begin with it.

    Templates trim the policy's text, and a difference in white space alone must not fork the
    conversation.
    """
    if full.startswith(existing):
        return full[len(existing) :]
    squashed = "".join(existing.split())
    if not squashed or not "".join(full.split()).startswith(squashed):
        return None
    solid = (place for place, character in enumerate(full, 1) if not character.isspace())
    rest = full[next(islice(solid, len(squashed) - 1, None)) :]
    blanks = "".join(takewhile(str.isspace, reversed(existing)))[::-1]
    return rest.removeprefix(blanks)
