"""A reward over HTTP: several servers of the same reward, which share the load.

Each request is a JSON POST with a part of a batch. It goes to the server with the fewest
outstanding requests; servers that failed recently are avoided for a while. After a failed
connection, a timeout or a 5xx answer, the request is retried after growing pauses, on another
server if there is one. When the retries are used up, the rollouts of the request fail. Addresses
are redacted in all messages, because they may contain passwords.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tunesmith.config.schema import RemoteReward
from tunesmith.learn.rewards.function import (
    ItemFailure,
    Notes,
    RewardFunction,
    Score,
    batch_columns,
    completions_of,
    scores_from,
)
from tunesmith.records.http_client import (
    BadAnswer,
    Unavailable,
    attempt_json,
    one_line,
    open_session,
    pause,
    token_in,
)
from tunesmith.records.plain import plain
from tunesmith.records.redact import redact
from tunesmith.types import Rollout, Status

ANSWER_BYTES = 1 << 20
ANSWER_BYTES_EACH = 1 << 14
"""Size limit of an answer: a fixed part, and a part per completion (for a number and the reason of
a failure)."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


def remote_reward(entry: RemoteReward, label: str, decode: Decode) -> RewardFunction:
    """The reward function that queries the servers of ``entry``.

    Args:
        label: the column that is sent as OpenRLHF's ``labels``.
        decode: turns a rollout's tokens into OpenRLHF's ``query`` and ``prompts``.
    """
    client = RewardClient(entry)

    async def score(rollouts: Sequence[Rollout], texts: Sequence[str], _: Notes) -> list[Score]:
        async def ask(start: int) -> list[Score]:
            part = slice(start, start + entry.batch_size)
            some = rollouts[part]
            if entry.protocol == "openrlhf":
                body = openrlhf_body(some, label, decode)
            else:
                body = tunesmith_body(some, texts[part])
            return await client.ask(session, body, len(some))

        async with open_session(entry.timeout, token_in(entry.token_env)) as session:
            scores = await asyncio.gather(*map(ask, range(0, len(rollouts), entry.batch_size)))
        return [score for part in scores for score in part]

    return RewardFunction(entry.name, entry.name, score, builtin=True)


def tunesmith_body(rollouts: Sequence[Rollout], texts: Sequence[str]) -> dict[str, Any]:
    """The arguments of a reward function, except tokens, and what reward models need besides."""
    body = {
        "prompts": [r.task.prompt for r in rollouts],
        "completions": completions_of(rollouts, texts),
        "columns": batch_columns(rollouts),
        "finish_reasons": [r.finish_reason for r in rollouts],
    }
    tools = [r.task.tools for r in rollouts]
    return body | ({"tools": tools} if any(tools) else {})


def openrlhf_body(rollouts: Sequence[Rollout], label: str, decode: Decode) -> dict[str, Any]:
    """OpenRLHF's request (0.5 and later): ``query`` is prompt and completion as the policy saw
    them, in one text."""
    golds = [r.task.columns.get(label) for r in rollouts]
    return {
        "query": [decode(r.token_ids) for r in rollouts],
        "prompts": [decode(r.task.prompt_ids) for r in rollouts],
        "labels": ["" if gold is None else gold for gold in golds],
    }


@dataclass(slots=True)
class _Server:
    outstanding: int = 0
    sent: int = 0
    failures: int = 0
    """Consecutive failures."""
    rests_until: float = 0.0

    def works(self) -> None:
        self.failures = 0
        self.rests_until = 0.0

    def rests(self) -> None:
        """Avoid it for a while: a dead server has nothing outstanding and would otherwise attract
        every request."""
        self.failures += 1
        self.rests_until = time.monotonic() + pause(self.failures)


class RewardClient:
    """Asks one of several servers, and another one if that fails."""

    def __init__(self, entry: RemoteReward) -> None:
        self.entry = entry
        self._servers = {url: _Server() for url in entry.urls}

    async def ask(
        self, session: aiohttp.ClientSession, body: dict[str, Any], size: int
    ) -> list[Score]:
        """One score per completion of the request; the same failure for each if no server gave a
        usable answer."""
        try:
            data = json.dumps(body, default=str).encode()
        except (ValueError, RecursionError) as error:
            return [ItemFailure(Status.REWARD_FAILED, f"cannot be sent as JSON: {error}")] * size
        most = ANSWER_BYTES + size * ANSWER_BYTES_EACH
        started = time.monotonic()
        tried: list[str] = []
        reason = ""
        status = Status.REWARD_FAILED
        while len(tried) <= self.entry.retries:
            if tried:
                await asyncio.sleep(pause(len(tried)))
            url = self._choose(tried)
            server = self._servers[url]
            tried.append(url)
            server.outstanding += 1
            server.sent += 1
            try:
                answer = await attempt_json(session, url, data, most)
                server.works()
                return scores_of(answer, size, url)
            except BadAnswer as error:
                server.works()
                reason = str(error)
                status = Status.REWARD_FAILED
                break
            except Unavailable as error:
                server.rests()
                reason = str(error)
                status = Status.TIMED_OUT if error.late else Status.REWARD_FAILED
            finally:
                server.outstanding -= 1
        if len(tried) > 1:
            seconds = time.monotonic() - started
            urls = ", ".join(dict.fromkeys(tried))
            reason += f" ({len(tried)} attempts in {seconds:.3g} s: {urls})"
        return [ItemFailure(status, redact(reason))] * size

    def _choose(self, tried: Sequence[str]) -> str:
        """The server least tried by this request; ties go to one not resting, then fewest
        outstanding, fewest sent."""
        now = time.monotonic()

        def load(url: str) -> tuple[int, bool, int, int]:
            server = self._servers[url]
            return tried.count(url), now < server.rests_until, server.outstanding, server.sent

        return min(self._servers, key=load)


def scores_of(answer: object, size: int, url: str) -> list[Score]:
    """The scores of an answer; an unusable item fails only its own rollout.

    Raises:
        BadAnswer: the answer has no list of ``size`` rewards.
    """
    fields = answer if isinstance(answer, dict) else {}
    if "rewards" not in fields:
        shown = one_line(json.dumps(plain(answer)))
        raise BadAnswer(f'{url} answered {shown}; expected {{"rewards": [{size} numbers]}}')
    try:
        scores = scores_from(fields["rewards"], size)
    except ValueError as error:
        raise BadAnswer(f"{url} {error}") from None
    errors: Any = fields.get("errors") or [None] * size
    if not isinstance(errors, list) or len(errors) != size:
        raise BadAnswer(f'{url} answered "errors" that are not a list of {size}')
    for i, (score, error) in enumerate(zip(scores, errors, strict=True)):
        if error:
            scores[i] = ItemFailure(Status.REWARD_FAILED, redact(f"{url}: {error}"))
        elif isinstance(score, ItemFailure):
            scores[i] = replace(score, reason=redact(f"{url} {score.reason}"))
    return scores
