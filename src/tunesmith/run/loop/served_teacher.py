"""A teacher behind an OpenAI-compatible server, which scores the student's samples."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress

import aiohttp
import numpy as np

from tunesmith.config.commands import TeacherSection
from tunesmith.errors import DataError, RewardError
from tunesmith.learn.data.batch import Floats
from tunesmith.records.http_client import BadAnswer, Unavailable, one_line, request_patiently
from tunesmith.records.redact import redact
from tunesmith.types import Prompt, Record, Rollout

ATTEMPT_SECONDS = 300.0
ANSWER_BYTES = 1 << 20
ANSWER_BYTES_EACH = 1 << 10
"""Limit of an answer: a fixed part, and a part per token."""


class ServedTeacher:
    """Called with rollouts; returns the teacher's log-probability of every token that the student
    wrote, record after record.

    The server gets token ids, so nothing is tokenized again; it answers with the log-probability of
    each token of the prompt (``echo``).

    Args:
        encode: a prompt's tokens, for ``section.prompt``.
    """

    def __init__(self, section: TeacherSection, encode: Callable[[Prompt], list[int]]) -> None:
        assert section.url is not None
        self._section = section
        self._url = f"{section.url.rstrip('/')}/completions"
        self._encode = encode

    def __call__(self, rollouts: Sequence[Rollout]) -> Floats:
        """Raises RewardError: the server gave no usable answer."""
        # The calling thread has an event loop of its own.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._score(rollouts)).result()

    async def _score(self, rollouts: Sequence[Rollout]) -> Floats:
        key = os.environ.get(self._section.token_env or "", "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else None
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_SECONDS)
        room = asyncio.Semaphore(self._section.concurrency)
        prompts = [self._prompt_of(rollout) for rollout in rollouts]
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:

            async def ask(record: Record, own: Sequence[int], theirs: list[int]) -> list[float]:
                # A record whose history was edited may begin with something else.
                begins = record.token_ids[: len(own)] == list(own)
                start = len(own) if begins else 0
                before = theirs if begins else []
                async with room:
                    scored = await self._ask(session, [*before, *record.token_ids[start:]])
                return list(compress(scored[len(before) :], record.sampled[start:]))

            jobs = [
                ask(record, rollout.task.prompt_ids, theirs)
                for rollout, theirs in zip(rollouts, prompts, strict=True)
                for record in rollout.records
                if record.num_sampled
            ]
            scored = await asyncio.gather(*jobs)
        return np.array([value for values in scored for value in values], np.float64)

    def _prompt_of(self, rollout: Rollout) -> list[int]:
        task = rollout.task
        column = self._section.prompt
        if column is None:
            return list(task.prompt_ids)
        prompt = task.columns.get(column)
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(f"task {task.id} has no prompt in '{column}' (teacher.prompt)")
        return self._encode(prompt)

    async def _ask(self, session: aiohttp.ClientSession, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token after those before it; 0 for the first."""
        body = {
            "model": self._section.model or self._section.path,
            "prompt": list(ids),
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        try:
            answer: object = await request_patiently(
                session,
                self._url,
                json.dumps(body).encode(),
                deadline=self._section.deadline,
                longest=ANSWER_BYTES + len(ids) * ANSWER_BYTES_EACH,
            )
            return self._read(answer, len(ids))
        except (BadAnswer, Unavailable) as error:
            raise RewardError(redact(f"the teacher (teacher.url): {error}")) from None

    def _read(self, answer: object, size: int) -> list[float]:
        match answer:
            case {"choices": [{"logprobs": {"token_logprobs": [_, *rest]}}, *_]}:
                values = rest[: size - 1]
            case _:
                values = []
        if len(values) != size - 1 or not all(isinstance(value, float | int) for value in values):
            shown = one_line(json.dumps(answer))
            raise BadAnswer(
                f"{self._url} answered {shown}; expected logprobs.token_logprobs of {size} tokens "
                "of the prompt"
            )
        return [0.0, *values]
