"""A teacher on a server: what it is asked, which tokens it scores, and what its failures become."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.support.http_servers import running, unused_url
from tunesmith.config.commands import TeacherSection
from tunesmith.errors import RewardError
from tunesmith.records import http_client
from tunesmith.run.loop.experience import rollout_batch
from tunesmith.run.loop.served_teacher import ServedTeacher
from tunesmith.run.loop.teacher import TeacherOfTokens
from tunesmith.types import Completion, Rollout, Sample, Task


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


def teacher(url: str, **keys: Any) -> Callable[[list[Rollout]], list[float]]:
    served = ServedTeacher(TeacherSection(path="org/t", url=url, **keys))
    one = TeacherOfTokens(served, (lambda _: [100, 200]) if "prompt" in keys else None)

    def scores(rollouts: list[Rollout]) -> list[float]:
        columns = one(rollouts, rollout_batch([(rollout, 0) for rollout in rollouts]))
        return columns["ref_logprobs"].tolist()

    return scores


def test_the_tokens_that_the_policy_wrote_are_scored_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "k-1")
    with scoring() as (url, bodies):
        one = teacher(url, model="big", token_env="TEACHER_KEY", concurrency=1)
        values = one([rollout((1, 2), [3, 4], [5]), rollout((7,), [8])])
    assert values == [-6.0, -10.0, -24.0, -15.0]
    assert [body["prompt"] for body in bodies] == [[1, 2, 3, 4, 9, 5], [7, 8]]
    assert bodies[0]["echo"] is True and bodies[0]["model"] == "big"
    assert bodies[0]["key"] == "Bearer k-1"


def test_the_teacher_may_see_another_prompt() -> None:
    with scoring() as (url, bodies):
        one = teacher(url, prompt="with_solution")
        values = one([rollout((1, 2), [3, 4], with_solution="p and its solution")])
        assert bodies[0]["prompt"] == [100, 200, 3, 4] and bodies[0]["model"] == "org/t"
    assert values == [-303.0, -307.0]


def test_a_record_with_an_edited_history_keeps_it() -> None:
    edited = rollout((1, 2), [3], with_solution="p")
    edited.records[0].token_ids[0] = 6
    with scoring() as (url, bodies):
        assert teacher(url, prompt="with_solution")([edited]) == [-11.0]
    assert bodies[0]["prompt"] == [6, 2, 3]


def test_a_server_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.001)

    def late(number: int, body: Any) -> web.Response:
        down = number < 3
        return web.Response(status=503) if down else web.json_response(scored(body["prompt"]))

    with scoring(late) as (url, bodies):
        assert teacher(url)([rollout((1,), [2])]) == [-3.0]
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


RANKED = {"token_id:7": -0.5, "token_id:300": -2.0, "token_id:2": -1.0}


def likeliest(answer: Any, **keys: Any) -> dict[str, Any]:
    """What is read of a server that ranks the same tokens at each place."""

    def ranks(_: int, body: Any) -> web.Response:
        places = [None, *[answer] * len(body["prompt"])]
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": places}}]})

    with scoring(ranks) as (url, bodies):
        one = ServedTeacher(TeacherSection(path="org/t", url=url), 2, **keys)
        said = one([Sample([1, 2, 3], [False, False, True]), Sample([1, 2], [False, True])])
    assert bodies[0]["logprobs"] == 2 and bodies[0]["return_tokens_as_token_ids"] is True
    return {name: values.tolist() for name, values in said.items()}


def test_the_likeliest_tokens_are_columns_without_the_one_that_is_there_besides() -> None:
    assert likeliest(RANKED) == {
        "teacher_tokens": [[7, 2], [7, 2]],
        "teacher_logprobs": [[-0.5, -1.0], [-0.5, -1.0]],
    }


@pytest.mark.parametrize(
    ("answer", "rows", "words"),
    [
        ({" the": -0.5, "a": -1.0}, None, "several may have the same text"),
        ({"token_id:7": -0.5}, None, "1 tokens at a place; expected 2"),
        ({"token_id:7": None, "token_id:8": -1.0}, None, "expected numbers"),
        ({"token_id:7": -0.5, "token_id:300": -1.0}, 300, "token 300, and .* 300 rows"),
        (None, None, "top_logprobs of 3 tokens"),
    ],
)
def test_what_a_server_cannot_rank_is_said(answer: Any, rows: int | None, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        likeliest(answer, rows=rows)
