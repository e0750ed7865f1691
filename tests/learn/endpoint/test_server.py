"""The policy over HTTP, as real clients speak with it."""

from __future__ import annotations

import gzip
import json
import socket
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.episodes import check_tokens, load, made_task, ok, play
from tunesmith.errors import ConfigError
from tunesmith.learn.endpoint.server import COUNT, INTERFACES, LARGEST_BODY, Endpoint
from tunesmith.records.addresses import is_served_name
from tunesmith.records.http_server import Limits
from tunesmith.types import Status

POLICY: Any = SimpleNamespace(model="m", available=True)
ASYNC = """
import aiohttp, json

START = [{"role": "user", "content": "Go."}]

async def agent(base_url, api_key, how, **columns):
    assert base_url.startswith("http://127.0.0.1:")
    plain = base_url.replace("/" + api_key, "")
    async with aiohttp.ClientSession() as http:
        async def ask(url=base_url, key="none", **request):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(url + "/chat/completions", json=request, headers=headers) as answer:
                if request.get("stream"):
                    return [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
                return answer.status, await answer.json()
        return await globals()[how](ask, http, plain, api_key, base_url)

async def talks(ask, http, plain, key, base_url):
    said = list(START)
    for url, key in ((base_url, "none"), (plain, key)):
        status, body = await ask(url=url, key=key, model="x", messages=said)
        assert status == 200, body
        message = body["choices"][0]["message"]
        assert body["object"] == "chat.completion" and body["choices"][0]["finish_reason"] == "stop"
        said += [message, {"role": "user", "content": [{"type": "text", "text": "More."}]}]
    return float(len(said))

async def streams(ask, http, plain, key, base_url):
    *chunks, done = await ask(messages=START, stream=True)
    first, *pieces, last = map(json.loads, chunks)
    assert done == "[DONE]" and first["object"] == "chat.completion.chunk"
    assert last["choices"][0]["finish_reason"] == "stop", "counts are sent where they are asked for"
    *chunks, done = await ask(messages=[*START, *START], stream=True, stream_options={"include_usage": True})
    assert json.loads(chunks[-1])["usage"]["completion_tokens"] > 0
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    return float("".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "hello")

async def is_refused(ask, http, plain, key, base_url):
    await ask(messages=START)
    wrong = [
        await ask(url=plain, key="wrong", messages=START),
        await ask(messages=START, n=0),
        await ask(messages="hello"),
        await ask(messages=START, stop=5),
        await ask(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]),
    ]
    async with http.post(base_url + "/chat/completions", data=b"{") as answer:
        wrong.append((answer.status, await answer.json()))
    for deep in (b"[" * 200_000, json.dumps({"messages": [{"role": "user", "content": chr(0xD800)}]}).encode()):
        async with http.post(base_url + "/chat/completions", data=deep) as answer:
            wrong.append((answer.status, await answer.json()))
    async with http.get(base_url + "/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "policy"
    async with http.get(base_url + "/models/policy") as answer:
        assert (await answer.json())["id"] == "policy"
    async with http.post(base_url + "/embeddings", json={}) as answer:
        assert answer.status == 404 and "/v1/responses" in (await answer.json())["error"]["message"]
    assert [status for status, _ in wrong] == [401, *[400] * 7], wrong
    assert all(body["error"]["message"] for _, body in wrong)
    params = [body["error"]["param"] for _, body in wrong]
    assert params == [None, "n", "messages", "stop", *[None] * 4]
    return 1.0

async def overflows(ask, http, plain, key, base_url):
    await ask(messages=START)
    status, body = await ask(messages=[{"role": "user", "content": "long " * 9000}])
    return float(status == 400 and body["error"]["code"] == "context_length_exceeded")
"""


def test_an_agent_with_a_client_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, ASYNC, path="env.py:agent")
    hows = {"talks": 5.0, "streams": 1.0, "is_refused": 1.0, "overflows": 1.0}
    for how, reward in hows.items():
        task = made_task(tokenizer, how=how)
        (rollout,), engine = play(environments, tokenizer, [task], lambda _: "hello<|im_end|>")
        check_tokens(ok(rollout), engine)
        assert rollout.reward == reward and len(rollout.records) == (2 if how == "streams" else 1)


PLAIN = """
import json, urllib.request

def agent(base_url, api_key, name, **columns):
    said = [{"role": "user", "content": name}]
    for _ in range(3):
        request = urllib.request.Request(
            base_url.replace("/" + api_key, "") + "/chat/completions",
            json.dumps({"messages": said}).encode(),
            {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            said.append(json.load(answer)["choices"][0]["message"])
        said.append({"role": "user", "content": "and"})
    if name == "late":
        keys.append((base_url, api_key))
    return float(sum(name in m["content"] for m in said) == 4)

keys = []
"""


def test_plain_agents_side_by_side_are_told_apart_by_their_keys(
    tokenizer: Any, tmp_path: Path
) -> None:
    environments = load(tmp_path, PLAIN, path="env.py:agent")

    def echo(text: str) -> str:
        return text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] + "<|im_end|>"

    tasks = [made_task(tokenizer, name=f"name {n}", identity=str(n)) for n in range(6)]
    rollouts, _ = play(environments, tokenizer, tasks, echo, group_size=2)
    assert len(rollouts) == 12
    for rollout in rollouts:
        assert ok(rollout).reward == 1.0 and len(rollout.records) == 1 and len(rollout.turns) == 3


def test_an_episode_that_is_over_is_not_answered(tokenizer: Any, tmp_path: Path) -> None:
    code = PLAIN.replace(
        "    said = [", "    if keys:\n        base_url, api_key = keys.pop()\n    said = [", 1
    )  # fmt: skip
    environments = load(tmp_path, code, path="env.py:agent")
    tasks = [made_task(tokenizer, name="late", identity=str(n)) for n in range(2)]

    first, second = play(
        environments, tokenizer, tasks, lambda _: "late<|im_end|>", concurrency=1
    )[0]  # fmt: skip
    assert ok(first).reward == 1.0
    assert second.status is Status.ENVIRONMENT_FAILED and "401" in str(second.error)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /k/v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{", 408),
        # Who has no key, and what is not served, is refused before its body is read.
        (b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{", 401),
        (b"POST /k/v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n", 404),
        (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost:1\r\n\r\n", 401),
        (b"POST /v1/responses HTT", None),
        (b"", None),
    ],
)
def test_connections_have_limits(sent: bytes, status: int | None) -> None:
    with (
        closing(
            Endpoint(Limits(head_seconds=60.0 if status else 0.1, body_seconds=0.1))
        ) as endpoint,
        endpoint.open(POLICY, "k"),
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=100) as connection,
    ):
        connection.sendall(sent)
        if status is None:
            with suppress(ConnectionResetError):
                assert not connection.recv(1), "it is closed without an answer"
            return
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == status and answer.headers["Connection"] == "close"
        assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_refused() -> None:
    head = f"POST /k/v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {LARGEST_BODY + 1}"
    with (
        closing(Endpoint()) as endpoint,
        endpoint.open(POLICY, "k"),
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=100) as connection,
    ):
        connection.sendall(f"{head}\r\n\r\n".encode())
        with suppress(ConnectionError):
            while True:
                connection.sendall(b" " * 2**20)
        answer = HTTPResponse(connection)
        with suppress(ConnectionError):  # the rest of the request may have crossed the answer
            answer.begin()
            assert answer.status == 413


def test_one_policy_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.learn.endpoint.server.LARGEST_TOGETHER", 100)
    head = "POST /{}/v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60\r\n\r\n"

    def ask(key: str) -> socket.socket:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
        connection.sendall(head.format(key).encode())
        return connection

    def status(connection: socket.socket) -> int:
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status

    other: Any = SimpleNamespace(model="n")
    limits = Limits(body_seconds=1.0)
    with (
        closing(Endpoint(limits)) as endpoint,
        endpoint.open(POLICY, "k"),
        endpoint.open(other, "o"),
        ExitStack() as stack,
    ):
        first, second, apart = ask("k"), ask("k"), ask("o")
        assert sorted([status(first), status(second)]) == [408, 429]
        assert status(apart) == 408 == status(ask("k")), "what ended is no longer counted"


def test_bodies_count_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a length have none before, and compressed ones are larger than theirs."""
    monkeypatch.setattr("tunesmith.learn.endpoint.server.LARGEST_TOGETHER", 100)
    head = b"POST /k/v1/messages HTTP/1.1\r\nHost: localhost\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    packed = gzip.compress(b" " * 1000)
    compressed = head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    assert len(packed) < 40

    def ask(sent: bytes) -> socket.socket:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
        connection.sendall(sent)
        return connection

    def status(connection: socket.socket) -> int:
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status

    limits = Limits(body_seconds=0.2)
    with closing(Endpoint(limits)) as endpoint, endpoint.open(POLICY, "k"), ExitStack() as stack:
        small = [ask(chunked + b"14\r\n" + b" " * 20) for _ in range(3)]
        assert status(ask(compressed + packed)) == 429
        assert status(ask(chunked + b"65\r\n" + b" " * 101)) == 429
        assert [*map(status, small)] == [408] * 3


def test_what_is_not_served_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(method: str, path: str) -> tuple[int, str | None, Any]:
        with closing(HTTPConnection("127.0.0.1", endpoint.port)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.headers["Allow"], json.loads(answer.read())

    with closing(Endpoint()) as endpoint, endpoint.open(POLICY, "k"):
        for path in (*INTERFACES, COUNT):
            assert ask("GET", f"/v1/{path}")[:2] == (405, "POST")
        for path in ("/k/v1/models", "/v1/models/m", "/health"):
            assert ask("POST", path)[:2] == (405, "GET, HEAD")
        status, allowed, body = ask("GET", "/v1/embeddings")
        assert (status, allowed) == (404, None) and "/v1/responses" in body["error"]["message"]
        assert ask("GET", "/health") == (200, None, {"status": "ok"}), "it needs no key"
        monkeypatch.setattr(POLICY, "available", False)
        assert ask("GET", "/health")[0] == 503


@pytest.mark.parametrize(
    ("host", "name", "served"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "10.0.0.7", False),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "evil.example", False),
        ("0.0.0.0", "10.0.0.7", True),
        ("0.0.0.0", socket.gethostname(), True),
        ("::", "evil.example", False),
    ],
)
def test_names_that_are_served(host: str, name: str, served: bool) -> None:
    assert is_served_name(host, name) == served


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        Endpoint(host="192.0.2.1")


def test_a_chosen_host_is_in_the_address_of_an_episode() -> None:
    policy: Any = SimpleNamespace(model="m")
    with closing(Endpoint(host="0.0.0.0")) as endpoint, endpoint.open(policy) as (url, key):
        assert url == f"http://{socket.gethostname()}:{endpoint.port}/{key}/v1"
        for place, sent, status in (
            ("127.0.0.1", {"Host": "evil.example"}, 421),
            ("127.0.0.1", {}, 401),
            ("127.0.0.1", {"x-api-key": key}, 200),
        ):
            connection = HTTPConnection(place, endpoint.port)
            with closing(connection):
                connection.request("GET", "/v1/models", headers=sent)
                assert connection.getresponse().status == status
