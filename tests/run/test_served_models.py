"""The names of a served model, and its engines: lost for a while or for good."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import httpx
import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.fake_engine import FakeEngine
from tests.support.fake_pool import Bench
from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import ConfigError, EngineLostError, NoEngineError
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.endpoint.server import Endpoint
from tunesmith.learn.environments.conversation import EpisodeSettings
from tunesmith.run.assembly import serve
from tunesmith.run.assembly.serve import ServedModel, ServedPolicy
from tunesmith.types import Sampling

MESSAGES = [{"role": "user", "content": "Go."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "Go."},
    "responses": {"input": "Go."},
    "messages": {"messages": MESSAGES, "max_tokens": 4},
    "messages/count_tokens": {"messages": MESSAGES},
}
TEXT = {"prompt": [5, 6]}


def model_of(engine: Any, names: tuple[str, ...] = ()) -> ServedModel:
    tokenizer = byte_level(template("qwen2"))
    made = ChatTemplate.of(tokenizer)
    setting = EpisodeSettings.of(tokenizer, made, lambda _: [], EnvironmentSection(), 512)
    return ServedModel("m", engine, setting, Sampling(4), names=names)


@asynccontextmanager
async def client_of(policy: ServedPolicy) -> AsyncIterator[httpx.AsyncClient]:
    with closing(Endpoint()) as endpoint, endpoint.open(policy, for_all=True):
        url = f"http://127.0.0.1:{endpoint.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client


@pytest.mark.parametrize("names", [("m", "org/m"), ()], ids=["served", "episode"])
async def test_another_model_is_not_answered_by_this_one(names: tuple[str, ...]) -> None:
    policy = ServedPolicy(model_of(FakeEngine(), names))
    async with client_of(policy) as client:
        for path, body in BODIES.items():
            for name in (*names, "", None):
                answer = await client.post(f"/v1/{path}", json={**body, "model": name})
                assert answer.status_code == 200, answer.text
            asked = {**body, "stream": True, "model": "other"}
            answer = await client.post(f"/v1/{path}", json=asked)
            assert answer.status_code == (404 if names else 200)
            if names:
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("model_not_found", "model")
                assert all(name in error["message"] for name in (*names, "other"))
        for name in ("m", "org/m", "other"):
            status = 404 if names and name == "other" else 200
            assert (await client.get(f"/v1/models/{name}")).status_code == status


async def test_while_no_engine_runs_the_server_is_not_healthy() -> None:
    bench = Bench(1, restarts=1)
    roster = bench.pool.roster
    await roster.opened()
    policy = ServedPolicy(model_of(bench.pool))
    async with client_of(policy) as client:
        assert (await client.get("/health")).status_code == 200
        await roster.hold()
        roster.lose(roster.seats[0], EngineLostError("gone"))
        assert (await client.get("/health")).status_code == 503
        roster.go_on()
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200, "it waited"
        assert (await client.get("/health")).status_code == 200
    await bench.pool.close()


class Lost(FakeEngine):
    """An engine in this process, whose ranks have ended."""

    async def generate(self, *_: Any) -> Any:
        raise EngineLostError("gone")


@pytest.mark.parametrize("alone", [False, True], ids=["pool", "alone"])
async def test_a_server_whose_engines_are_lost_says_so_and_ends(
    alone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(1, restarts=0)
    served = model_of(Lost() if alone else bench.pool)
    serving = asyncio.create_task(serve._serve(served, "127.0.0.1", 0, None))
    said = ""
    while " at " not in said:
        await asyncio.sleep(0.001)
        said += capsys.readouterr().out
    for member in bench.made:
        await member.kill()
    url = said.split(" at ")[1].split(";")[0]
    async with httpx.AsyncClient(timeout=60) as client:
        many = [client.post(f"{url}/completions", json=TEXT) for _ in range(3)]
        answers = await asyncio.gather(*many, return_exceptions=True)
    found = [answer for answer in answers if isinstance(answer, httpx.Response)]
    assert found, "later ones may find it closed"
    for answer in found:
        assert answer.status_code == 503
        assert ("gone" if alone else "is no more") in answer.json()["error"]["message"]
    with pytest.raises(EngineLostError if alone else NoEngineError):
        await serving


async def test_engines_that_cannot_start_are_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(1)
    bench.refused.append(ConfigError("too little memory"))
    with pytest.raises(ConfigError, match="too little memory"):
        await serve._serve(model_of(bench.pool), "127.0.0.1", 0, None)
    assert not capsys.readouterr().out


async def test_a_signal_ends_a_server_whose_engines_still_start() -> None:
    bench = Bench(1)
    starting = asyncio.Event()

    async def start(_: int) -> Any:
        starting.set()
        await asyncio.Event().wait()

    bench.pool.roster._start = start
    serving = asyncio.create_task(serve._serve(model_of(bench.pool), "127.0.0.1", 0, None))
    await starting.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
