"""The core of the endpoint, which knows no interface: a policy answers what a client asks, and what
it writes is followed while it writes.

A request becomes an ``Ask``; the policy answers it with a ``Reply`` per choice. An interface is an
``Exchange``: it reads one request, and writes the answer whole or as events.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, ClassVar, Protocol

from tunesmith.errors import EpisodeError, shortened
from tunesmith.learn.endpoint.asks import Ask, Json, UnknownModel
from tunesmith.learn.endpoint.checks import Unmet, problems_of
from tunesmith.learn.environments.base import Growing
from tunesmith.learn.environments.conversation import EpisodeSettings, Reply, before_stop
from tunesmith.learn.environments.tools import marks_of
from tunesmith.learn.usercode.calls import all_or_error
from tunesmith.types import Message

Event = tuple[str | None, str]
"""A server-sent event: its name, if it has one, and its data."""
Follow = Callable[[int, Growing], None]
"""Gets the unfinished completion of a choice, when the policy begins it."""
Decode = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"
"""What a tokenizer decodes instead of part of a character."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer begins with, before any text is known."""

    number: int
    """From 1; ids of answers end with it."""
    created: int
    """Seconds since 1970."""
    model: str


@dataclass(frozen=True, slots=True)
class TokenText:
    """A sampled token as clients get it."""

    text: str
    logprob: float
    likeliest: Sequence[tuple[str, float]] = ()
    """The likeliest tokens in its place with their log-probabilities, if they are known."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text or tokens of one choice."""

    index: int
    text: str
    tokens: Sequence[TokenText]
    """The choice's new tokens; ``text`` may end before or after their text."""


@dataclass(frozen=True, slots=True)
class Answer:
    replies: Sequence[Reply]
    """By prompt, ``n`` of each."""
    problems: Sequence[Unmet]
    """Where the replies are not what was asked for."""
    n: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once."""
        return sum(reply.prompt_tokens for reply in self.replies[:: self.n])

    @property
    def written_tokens(self) -> int:
        return sum(len(reply.completion.token_ids) for reply in self.replies)

    def said(self) -> Json:
        """The problems as a field of the answer, if there are any."""
        return {"unmet": [asdict(problem) for problem in self.problems]} if self.problems else {}


class Policy(ABC):
    """Who answers: an episode of a run, or a served model. ``answer`` and ``count`` have to be
    called on the event loop where it is made."""

    what: ClassVar[str]
    """What it is to its clients, for messages."""
    names: tuple[str, ...] = ()
    """What requests may call its model; empty: anything."""
    ranks = False
    """Whether it says the likeliest tokens beside those that it wrote, when it has written all."""

    def __init__(self, model: str, setting: EpisodeSettings) -> None:
        self.model = model
        self.loop = asyncio.get_running_loop()
        self.renderer = setting.renderer
        self.marks = marks_of(setting.parse) if setting.parse else ()
        """Texts with one of which every tool call begins."""
        self.responses: dict[str, list[Message]] = {}
        """By the id of a ``responses`` answer: the conversation up to and including it."""
        self.numbers = count(1)

    @property
    def available(self) -> bool:
        """Whether it can answer now."""
        return True

    @abstractmethod
    async def answer(self, ask: Ask, follow: Follow | None = None) -> Answer:
        """``ask.choices`` replies, written concurrently.

        Raises:
            BadRequest: this policy cannot answer it.
            EpisodeError, EngineError: as ``Conversation.reply``.
        """

    @abstractmethod
    def count(self, ask: Ask) -> int:
        """The tokens of the prompt. Raises EpisodeError: it cannot go through the template."""


class Exchange(Protocol):
    """One request of an interface, and its answer."""

    ask: Ask
    streamed: bool

    def whole(self, answer: Answer) -> Json: ...

    def begin(self) -> Iterator[Event]:
        """The events before the first piece."""
        ...

    def add(self, piece: TextPiece) -> Iterator[Event]: ...

    def end(self, answer: Answer) -> Iterator[Event]:
        """The events after the last piece."""
        ...


def check_name(asked: object, policy: Policy) -> None:
    """Raises UnknownModel: a request asks for another model; one that names none may."""
    if asked and policy.names and asked not in policy.names:
        valid = f"valid: {', '.join(policy.names)}"
        why = f"'model' = {shortened(repr(asked))} is not served; {valid}"
        raise UnknownModel(why, "model")


def head_of(policy: Policy) -> AnswerHead:
    return AnswerHead(next(policy.numbers), int(time.time()), policy.model)


async def all_replies(ask: Ask, reply: Callable[[int], Coroutine[Any, Any, Reply]]) -> Answer:
    """``ask.choices`` concurrent replies; the first error cancels the others and is raised
    unchanged."""
    replies = await all_or_error([reply(index) for index in range(ask.choices)])
    return Answer(replies, await problems_of(ask, replies), ask.n)


class Spoken:
    """A choice's text while it is sampled, as far as it can no longer change.

    Held back are parts of a character, what may be the beginning of a stop string, and, where there
    are tools, everything from a tool call on and white space, which is dropped before a call. The
    pieces together are the text of the reply.
    """

    def __init__(self, index: int, ask: Ask, policy: Policy) -> None:
        self._index = index
        self._renderer = policy.renderer
        self._stop = ask.stop
        self._marks = policy.marks if ask.tools and ask.may_call else ()
        self._wants_tokens = ask.logprobs is not None
        self._waits = bool(ask.logprobs) and policy.ranks
        """Whether the tokens come with the rest, when their alternatives are known."""
        self._growing: Growing | None = None
        self._ids: list[int] = []
        self._sent = ""

    def follow(self, growing: Growing) -> None:
        """Read from this completion. A second one (the engine was interrupted or lost) is not
        followed: what it has comes with the reply."""
        self._growing = self._growing or growing

    def more(self) -> TextPiece | None:
        """What is new since the last call, if anything."""
        if self._growing is None:
            return None
        token_ids, logprobs, _ = self._growing.beyond(len(self._ids))
        if not token_ids:
            return None
        self._ids += token_ids
        text = self._settled()
        new = text[len(self._sent) :] if text.startswith(self._sent) else ""
        self._sent += new
        tokens = [] if self._waits else self._tokens(token_ids, logprobs)
        return TextPiece(self._index, new, tokens) if new or tokens else None

    def rest(self, reply: Reply) -> TextPiece:
        """What the reply has beyond the pieces.

        Raises:
            EpisodeError: the pieces were not its beginning.
        """
        whole = reply.message["content"]
        ids = reply.completion.token_ids
        if ids[: len(self._ids)] != self._ids or not whole.startswith(self._sent):
            raise EpisodeError("the completion began anew elsewhere: ask again")
        new = 0 if self._waits else len(self._ids)
        tokens = tokens_of(reply, self._renderer.verbatim)[new:] if self._wants_tokens else []
        return TextPiece(self._index, whole[len(self._sent) :], tokens)

    def _tokens(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[TokenText]:
        if not self._wants_tokens:
            return []
        decode = self._renderer.verbatim
        return [TokenText(decode([one]), each) for one, each in zip(ids, logprobs, strict=True)]

    def _settled(self) -> str:
        if self._marks and any(mark in self._renderer.verbatim(self._ids) for mark in self._marks):
            return self._sent
        text = self._renderer.plain(self._ids).rstrip(INCOMPLETE)
        cut = before_stop(text, self._stop)
        if cut != text:
            return cut
        text = without_beginning(text, (*self._stop, *self._marks))
        return text.rstrip() if self._marks else text


def tokens_of(reply: Reply, decode: Decode) -> list[TokenText]:
    """The tokens of a turn."""
    ids = reply.completion.token_ids
    if not reply.scores:
        sampled = zip(ids, reply.completion.logprobs, strict=True)
        return [TokenText(decode([token]), logprob) for token, logprob in sampled]
    return [
        TokenText(decode([token]), logprob, [(decode([id_]), each) for id_, each in others.items()])
        for token, (logprob, others) in zip(ids, reply.scores, strict=True)
    ]


def without_beginning(text: str, ends: Sequence[str]) -> str:
    """``text`` without the longest end that one of ``ends`` begins with."""
    longest = max(map(len, ends), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(end.startswith(text[-length:]) for end in ends):
            return text[:-length]
    return text
