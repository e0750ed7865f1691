"""Where a judge's answers come from: an OpenAI-compatible server, with a record of all answers on
disk, the policy, or another model of this process.

A judge that fails has no answer (``Unanswered``); it never raises.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from tunesmith.config.judges import JudgeReward
from tunesmith.errors import EngineError, NoEngineError, UserError
from tunesmith.learn.usercode.calls import PerLoop
from tunesmith.records.http_client import (
    BadAnswer,
    Unavailable,
    attempt_json,
    one_line,
    open_session,
    pause,
    token_in,
)
from tunesmith.records.metrics import JsonLines, keep_lines
from tunesmith.records.redact import HIDDEN, redact

ANSWERS_FILE = "judgements.jsonl"
LONGEST_ANSWER = 4 << 20
"""Bytes of a server's answer."""


MOST_TOKENS = 2**40
"""The most tokens of a question or an answer; a server that reports more is not believed."""


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    text: str
    vote: int = 0
    """Its number among questions of the same text, each of which is sampled anew."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question without an answer, or with one that was cut off."""

    reason: str
    text: str = ""


Answer = str | Unanswered


def cut_off(entry: JudgeReward) -> str:
    """Why an answer that was cut off has no verdict: the last one counts, and it may be missing."""
    return f"the answer was cut off at max_new_tokens = {entry.max_new_tokens}; raise it"


@dataclass(slots=True)
class Tally:
    """What a judge did since its metrics were read last."""

    questions: int = 0
    cached: int = 0
    """JudgeQuestions that had been answered before."""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Judge(Protocol):
    tally: Tally

    async def answers(self, questions: Sequence[JudgeQuestion]) -> list[Answer]:
        """One answer per question; questions that are equal are asked once."""
        ...

    def close(self) -> None: ...


class AnswerFile:
    """The answers of a run's judges by the content of the request, also for a run that resumes.

    Args:
        folder: the run's directory; None keeps the answers in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / ANSWERS_FILE if folder else None
        self._file: JsonLines | None = None
        self._kept: dict[str, str] | None = None

    def get(self, key: str) -> str | None:
        return self._loaded().get(key)

    def add(self, key: str, judge: str, answer: str) -> None:
        self._loaded()[key] = answer
        if self._path is None:
            return
        if self._file is None:
            self._file = JsonLines(self._path, private=True)
        self._file.write({"key": key, "judge": judge, "answer": answer})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _loaded(self) -> dict[str, str]:
        if self._kept is None:
            kept = self._kept = dict[str, str]()

            def keep(line: Mapping[str, str]) -> bool:
                kept[line["key"]] = line["answer"]
                return True

            if self._path is not None:
                keep_lines(self._path, keep)
        return self._kept


class ServedJudge:
    """Asks a server, ``concurrency`` questions at a time and ``requests_per_minute`` at the most.

    After a question for which the server was not reached in any attempt, further ones have one
    attempt each until it answers again.
    """

    def __init__(self, entry: JudgeReward, kept: AnswerFile) -> None:
        assert entry.url is not None
        self._entry = entry
        self._url = f"{entry.url.rstrip('/')}/chat/completions"
        self._key = token_in(entry.token_env)
        self._kept = kept
        self._room = PerLoop(lambda: asyncio.Semaphore(entry.concurrency))
        self._next = 0.0
        """When the next request may start, in monotonic time."""
        self._down = False
        self.tally = Tally()

    async def answers(self, questions: Sequence[JudgeQuestion]) -> list[Answer]:
        self.tally.questions += len(questions)
        keys = {question: self._digest(question) for question in questions}
        kept = {question: self._kept.get(key) for question, key in keys.items()}
        found: dict[JudgeQuestion, Answer] = {q: a for q, a in kept.items() if a is not None}
        self.tally.cached += sum(question in found for question in questions)
        asked = [question for question in keys if question not in found]
        if asked:
            async with open_session(self._entry.timeout, self._key) as session:
                jobs = (self._ask(session, question, keys[question]) for question in asked)
                answers = await asyncio.gather(*jobs)
            found |= zip(asked, answers, strict=True)
        return [found[question] for question in questions]

    def close(self) -> None:
        self._kept.close()

    def _body(self, question: JudgeQuestion) -> dict[str, object]:
        entry = self._entry
        extra = entry.extra or {}
        # Models that refuse ``max_tokens`` refuse it beside this, too.
        limit = {} if "max_completion_tokens" in extra else {"max_tokens": entry.max_new_tokens}
        return {
            "model": entry.model,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": entry.temperature,
            **limit,
            "seed": entry.seed + question.vote,
            **extra,
        }

    def _digest(self, question: JudgeQuestion) -> str:
        content = json.dumps([self._url, self._body(question)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    async def _ask(
        self, session: aiohttp.ClientSession, question: JudgeQuestion, key: str
    ) -> Answer:
        try:
            body = json.dumps(self._body(question)).encode()
        except ValueError as error:
            return Unanswered(f"the question cannot be sent as JSON: {error}")
        async with self._room.here:
            await self._turn()
            answer = await self._try(session, body)
        if isinstance(answer, str):
            self._kept.add(key, self._entry.name, answer)
        return answer

    async def _try(self, session: aiohttp.ClientSession, body: bytes) -> Answer:
        entry = self._entry
        end = time.monotonic() + entry.deadline
        tried = 0
        while True:
            tried += 1
            try:
                return await self._attempt(session, body)
            except BadAnswer as error:
                return self._unanswered(str(error), tried)
            except Unavailable as error:
                reason = str(error)
                wait = error.after + pause(tried)
            if tried > (0 if self._down else entry.retries):
                self._down = True
                return self._unanswered(reason, tried)
            if time.monotonic() + wait > end:
                late = f"another attempt would exceed the deadline of {entry.deadline:g} s"
                return self._unanswered(f"{reason}; {late}", tried)
            await asyncio.sleep(wait)
            await self._turn()

    async def _attempt(self, session: aiohttp.ClientSession, body: bytes) -> Answer:
        """The answer.

        Raises:
            BadAnswer: another attempt would not help.
            Unavailable: it might.
        """
        self.tally.requests += 1
        try:
            answer = await attempt_json(session, self._url, body, LONGEST_ANSWER)
        except BadAnswer:
            self._down = False
            raise
        except Unavailable as error:
            if error.after <= self._entry.deadline:
                self._next = max(self._next, time.monotonic() + error.after)
            raise
        self._down = False
        return self._read(answer)

    async def _turn(self) -> None:
        """Wait until the next request may start."""
        now = time.monotonic()
        start = max(now, self._next)
        if self._entry.requests_per_minute:
            self._next = start + 60.0 / self._entry.requests_per_minute
        if start > now:
            await asyncio.sleep(start - now)

    def _read(self, answer: object) -> Answer:
        """The text of a chat completion, whose tokens are counted."""
        match answer:
            case {"choices": [{"message": {"content": str() as text}, **rest}, *_]}:
                cut = rest.get("finish_reason") == "length"
            case _:
                shown = one_line(json.dumps(answer))
                raise BadAnswer(f"{self._url} answered {shown}; expected a chat completion")
        match answer:
            case {
                "usage": {"prompt_tokens": int() as read, "completion_tokens": int() as written}
            } if all(0 <= count < MOST_TOKENS for count in (read, written)):
                self.tally.prompt_tokens += read
                self.tally.completion_tokens += written
            case _:
                pass
        return Unanswered(cut_off(self._entry), text) if cut else text

    def _unanswered(self, reason: str, tried: int) -> Unanswered:
        """The reason without the key, which a server may repeat."""
        shown = reason.replace(self._key, HIDDEN) if self._key else reason
        return Unanswered(redact(f"{shown} (attempts: {tried})"))


@dataclass(frozen=True, slots=True)
class Written:
    """What a model of this process wrote as a judge."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cut_off: bool = False


Write = Callable[[str, int], Awaitable[Written]]
"""From a question and a seed to the answer."""


class PolicyJudge:
    """Asks a model of this process: the policy, as it is now, whose answers are not kept, because
    it changes; or a frozen one.

    Args:
        kept: the answers of a frozen one.
        end: closes its engine.
    """

    def __init__(
        self,
        entry: JudgeReward,
        write: Write,
        kept: AnswerFile | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._entry = entry
        self._write = write
        self._kept = kept
        self._end = end
        self._room = PerLoop(lambda: asyncio.Semaphore(entry.concurrency))
        self.tally = Tally()

    async def answers(self, questions: Sequence[JudgeQuestion]) -> list[Answer]:
        self.tally.questions += len(questions)
        asked = list(dict.fromkeys(questions))
        found = dict(zip(asked, await asyncio.gather(*map(self._answer, asked)), strict=True))
        return [found[question] for question in questions]

    def close(self) -> None:
        if self._kept:
            self._kept.close()
        if self._end:
            self._end()

    async def _answer(self, question: JudgeQuestion) -> Answer:
        if self._kept is None:
            return await self._ask(question)
        entry = self._entry
        how = [entry.path, entry.temperature, entry.max_new_tokens, entry.seed + question.vote]
        key = hashlib.sha256(json.dumps([how, question.text]).encode()).hexdigest()
        answer = self._kept.get(key)
        if answer is not None:
            self.tally.cached += 1
            return answer
        answer = await self._ask(question)
        if isinstance(answer, str):
            self._kept.add(key, entry.name, answer)
        return answer

    async def _ask(self, question: JudgeQuestion) -> Answer:
        self.tally.requests += 1
        try:
            async with self._room.here, asyncio.timeout(self._entry.deadline):
                written = await self._write(question.text, self._entry.seed + question.vote)
        except NoEngineError:
            raise
        except (EngineError, UserError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            limit = f"not answered within {self._entry.deadline:g} s (deadline)"
            return Unanswered(limit if late else str(error))
        self.tally.prompt_tokens += written.prompt_tokens
        self.tally.completion_tokens += written.completion_tokens
        text = written.text
        return Unanswered(cut_off(self._entry), text) if written.cut_off else text
