"""A teacher on a server: what it is asked, which tokens it scores, and what its failures become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.support.http_servers import running, unused_url
from tunesmith.config.commands import TeacherSection
from tunesmith.errors import DataError, RewardError
from tunesmith.records import http_client
from tunesmith.run.loop.served_teacher import ServedTeacher
from tunesmith.types import Completion, Rollout, Task


@contextmanager
def scoring(answer: Any = None) -> Iterator[tuple[str, list[Any]]]:
    """A server in which each token's log-probability is minus the sum of all up to it."""
    bodies: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body | {"key": request.headers.get("Authorization")})
        if answer is not None:
            return answer(len(bodies), body)
        return web.json_response(scored(body["prompt"]))

    app = web.Application()
    app.add_routes([web.post("/v1/completions", handle)])
    with running(app) as url:
        yield f"{url}/v1", bodies


def scored(ids: list[int]) -> dict[str, Any]:
    sums = [-float(sum(ids[: n + 1])) for n in range(len(ids))]
    return {"choices": [{"logprobs": {"token_logprobs": [None, *sums[1:], -0.5]}}]}


def rollout(prompt: tuple[int, ...], *turns: list[int], **columns: Any) -> Rollout:
    """Turns of the policy, with one token of the environment between them."""
    made = Rollout(Task("t", "p", prompt, columns))
    made.observe(prompt)
    for number, ids in enumerate(turns):
        if number:
            made.observe([9])
        made.act(Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    return made


def teacher(url: str, **keys: Any) -> ServedTeacher:
    return ServedTeacher(TeacherSection(path="org/t", url=url, **keys), lambda _: [100, 200])


def test_the_tokens_that_the_policy_wrote_are_scored_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "k-1")
    with scoring() as (url, bodies):
        one = teacher(url, model="big", token_env="TEACHER_KEY", concurrency=1)
        values = one([rollout((1, 2), [3, 4], [5]), rollout((7,), [8])])
    assert values.tolist() == [-6.0, -10.0, -24.0, -15.0]
    assert [body["prompt"] for body in bodies] == [[1, 2, 3, 4, 9, 5], [7, 8]]
    assert bodies[0]["echo"] is True and bodies[0]["model"] == "big"
    assert bodies[0]["key"] == "Bearer k-1"


def test_the_teacher_may_see_another_prompt() -> None:
    with scoring() as (url, bodies):
        one = teacher(url, prompt="with_solution")
        values = one([rollout((1, 2), [3, 4], with_solution="p and its solution")])
        assert bodies[0]["prompt"] == [100, 200, 3, 4] and bodies[0]["model"] == "org/t"
        with pytest.raises(DataError, match="with_solution"):
            one([rollout((1, 2), [3])])
    assert values.tolist() == [-303.0, -307.0]


def test_a_record_with_an_edited_history_keeps_it() -> None:
    edited = rollout((1, 2), [3], with_solution="p")
    edited.records[0].token_ids[0] = 6
    with scoring() as (url, bodies):
        assert teacher(url, prompt="with_solution")([edited]).tolist() == [-11.0]
    assert bodies[0]["prompt"] == [6, 2, 3]


def test_a_server_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.001)

    def late(number: int, body: Any) -> web.Response:
        down = number < 3
        return web.Response(status=503) if down else web.json_response(scored(body["prompt"]))

    with scoring(late) as (url, bodies):
        assert teacher(url)([rollout((1,), [2])]).tolist() == [-3.0]
        assert len(bodies) == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"choices": [{"text": "x"}]}, "token_logprobs"),
        ({"choices": [{"logprobs": {"token_logprobs": [None]}}]}, "token_logprobs of 2"),
        ({"choices": [{"logprobs": {"token_logprobs": [None, None]}}]}, "token_logprobs"),
        ("<html>", "expected logprobs"),
    ],
)
def test_an_answer_that_cannot_be_used_ends_the_run(answer: Any, words: str) -> None:
    with (
        scoring(lambda *_: web.json_response(answer)) as (url, _),
        pytest.raises(RewardError, match=words),
    ):
        teacher(url)([rollout((1,), [2])])


def test_a_server_that_stays_away_ends_the_run() -> None:
    with pytest.raises(RewardError, match="no answer"):
        teacher(unused_url(), deadline=0.01)([rollout((1,), [2])])
