"""A teacher behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress

import aiohttp
import numpy as np

from tunesmith.config.commands import TeacherSection
from tunesmith.errors import RewardError
from tunesmith.learn.data.batch import Floats
from tunesmith.models.teacher import TEACHER_LOGPROBS, TEACHER_TOKENS
from tunesmith.records.http_client import (
    BadAnswer,
    Unavailable,
    one_line,
    open_session,
    request_patiently,
    token_in,
)
from tunesmith.records.redact import redact
from tunesmith.types import Sample

ATTEMPT_SECONDS = 300.0
ANSWER_BYTES = 1 << 20
ANSWER_BYTES_EACH = 1 << 10
ANSWER_BYTES_RANKED = 1 << 6
"""Limit of an answer: a fixed part, a part per token, and one for each that is ranked there."""
NUMBERED = "token_id:"
"""What vLLM and ``tunesmith serve`` write before a token's number, if they are asked for it."""


class ServedTeacher:
    """Called with samples; returns the columns of what a server says of their predictions.

    It gets token ids, so nothing is tokenized again, and answers with the log-probabilities of the
    prompt's tokens (``echo``).

    Args:
        top_k: how many likeliest tokens each prediction is compared with; None: the server says the
            log-probability of the predicted token.
        rows: of the student's embedding; None: unknown.
    """

    def __init__(
        self, section: TeacherSection, top_k: int | None = None, rows: int | None = None
    ) -> None:
        assert isinstance(section.url, str), "a section of one teacher"
        self._section = section
        self._top_k = top_k
        self._rows = rows
        self._url = f"{section.url.rstrip('/')}/completions"

    def __call__(self, samples: Sequence[Sample]) -> Mapping[str, Floats]:
        """Raises RewardError: the server gave no usable answer."""
        # The calling thread may have an event loop of its own.
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(asyncio.run, self._score(samples)).result()
        none = np.zeros(0 if self._top_k is None else (0, 2, self._top_k))
        said = np.concatenate([none, *answers])
        if self._top_k is None:
            return {"ref_logprobs": said}
        return {TEACHER_TOKENS: said[:, 0], TEACHER_LOGPROBS: said[:, 1]}

    async def _score(self, samples: Sequence[Sample]) -> list[Floats]:
        token = token_in(self._section.token_env)
        room = asyncio.Semaphore(self._section.concurrency)
        async with open_session(ATTEMPT_SECONDS, token) as session:

            async def ask(sample: Sample) -> Floats:
                async with room:
                    return await self._ask(session, sample)

            return await asyncio.gather(*map(ask, samples))

    async def _ask(self, session: aiohttp.ClientSession, sample: Sample) -> Floats:
        """The log-probability at each prediction, ``[n]``; or the likeliest tokens and their
        log-probabilities, ``[n, 2, k]``."""
        ranked = self._top_k or 1
        size = len(sample.token_ids)
        body = {
            "model": self._section.model or self._section.path,
            "prompt": list(sample.token_ids),
            "echo": True,
            "logprobs": ranked,
            "return_tokens_as_token_ids": self._top_k is not None,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        try:
            answer: object = await request_patiently(
                session,
                self._url,
                json.dumps(body).encode(),
                deadline=self._section.deadline,
                longest=ANSWER_BYTES + size * (ANSWER_BYTES_EACH + ranked * ANSWER_BYTES_RANKED),
            )
            return self._read(answer, sample)
        except (BadAnswer, Unavailable) as error:
            raise RewardError(redact(f"the teacher (teacher.url): {error}")) from None

    def _read(self, answer: object, sample: Sample) -> Floats:
        kind = "token_logprobs" if self._top_k is None else "top_logprobs"
        match answer:
            case {"choices": [{"logprobs": {**said}}, *_]} if isinstance(said.get(kind), list):
                listed = said[kind][: len(sample.token_ids)]
            case _:
                listed = []
        expected = float | int if self._top_k is None else dict
        predicted = [*compress(listed, sample.loss_mask)]
        whole = len(listed) == len(sample.token_ids)
        if not whole or not all(isinstance(value, expected) for value in predicted):
            raise BadAnswer(
                f"{self._url} answered {one_line(json.dumps(answer))}; expected logprobs.{kind} of "
                f"{len(sample.token_ids)} tokens of the prompt"
            )
        if self._top_k is None:
            return np.array(predicted, np.float64)
        return np.array([self._likeliest(ranked, self._top_k) for ranked in predicted], np.float64)

    def _likeliest(self, ranked: Mapping[str, object], top_k: int) -> list[list[float]]:
        """The numbers of the ``top_k`` likeliest tokens, and their log-probabilities.

        A server may add the token that is there, however unlikely.
        """
        known: list[tuple[float, int]] = []
        for name, logprob in ranked.items():
            number = name.removeprefix(NUMBERED)
            if number == name or not number.isdecimal() or not isinstance(logprob, float | int):
                raise BadAnswer(
                    f"{self._url} ranks tokens as {one_line(json.dumps(ranked))}; expected numbers "
                    "of tokens (return_tokens_as_token_ids): several may have the same text"
                )
            known.append((logprob, int(number)))
        best = sorted(known, reverse=True)[:top_k]
        tokens = [token for _, token in best]
        if len(best) < top_k:
            raise BadAnswer(f"{self._url} ranks {len(best)} tokens at a place; expected {top_k}")
        if self._rows is not None and max(tokens) >= self._rows:
            rows = f"the student's embedding has {self._rows} rows"
            raise BadAnswer(f"{self._url} ranks token {max(tokens)}, and {rows}")
        return [list(map(float, tokens)), [logprob for logprob, _ in best]]
