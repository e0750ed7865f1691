"""HTTP, spoken badly: what a reward server is sent, and what a remote reward is answered.

Every request is answered with a status below 500 or its connection is closed; no handler fails with
a traceback; the server answers a good request after each. Every answer of a remote server becomes
scores or failures of those rollouts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from tests.support.http_servers import answering
from tunesmith.config.schema import RemoteReward
from tunesmith.learn.rewards.remote import remote_reward
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.records import http_client
from tunesmith.types import Completion, Rollout, Status, Task

SEED = int(os.environ.get("TRIES_SEED", "0"))
GOOD = json.dumps({"prompts": ["p"], "completions": ["abc"]}).encode()
JSON = "Content-Type: application/json\r\n"


def post(
    body: bytes, headers: str = JSON, length: int | None = None, host: str = "localhost"
) -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST /reward HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: {size}\r\n\r\n".encode()
        + body
    )


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


RAW: dict[str, bytes] = {
    "nothing": b"",
    "garbage": b"\x00\xff\x16\x03\x01" * 20,
    "TLS hello": bytes.fromhex("1603010200010001fc0303") + b"\x01" * 200,
    "half a head": b"POST /reward HTTP/1.1\r\nHost: local",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": (
        b"POST /reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        b"Content-Length: 4\r\n\r\nabc"
    ),
    "length and chunks": post(GOOD, JSON + "Transfer-Encoding: chunked\r\n"),
    "negative length": post(GOOD, JSON, -5),
    "length in words": b"POST /reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n",
    "huge length": post(GOOD, JSON, 10**18),
    "less than it says": post(GOOD, JSON, len(GOOD) + 100),
    "long header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
    "long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "old version": b"GET /health HTTP/0.9\r\n\r\n",
    "new version": b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n",
    "bad chunk": (
        b"POST /reward HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"
    ),
    "smuggled": post(b"0\r\n\r\nGET /admin HTTP/1.1\r\nHost: x\r\n\r\n", JSON),
    "null in header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    "line feeds alone": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "another method": b"DELETE /reward HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "unknown method": b"BREW /reward HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another path": b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "rebound name": post(GOOD, host="evil.example"),
    "rebound name with port": post(GOOD, host="evil.example:80"),
    "host of junk": post(GOOD, host="[::1"),
    "form": post(b"a=b", "Content-Type: text/plain\r\n"),
    "no type": post(GOOD, ""),
    "upgrade": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\n\r\n"
    ),
    "gzip that is none": post(GOOD, JSON + "Content-Encoding: gzip\r\n"),
    "unknown encoding": post(GOOD, JSON + "Content-Encoding: zebra\r\n"),
    "charset that is none": post(GOOD, "Content-Type: application/json; charset=zebra\r\n"),
    "deep": post(deep(100_000)),
    "deep column": post(
        b'{"prompts": ["a"], "completions": ["b"], "columns": {"x": [' + deep(900) + b"]}}"
    ),
    "too large": post(b"[" + b"1," * 600_000 + b"1]"),
    "not UTF-8": post(b'{"prompts": ["\xff\xfe"], "completions": ["x"]}'),
    "lone surrogate": post(b'{"prompts": ["\\ud800"], "completions": ["\\udfff"]}'),
    "huge number": post(
        b'{"prompts": ["a"], "completions": ["b"], "columns": {"x": [' + b"9" * 5000 + b"]}}"
    ),
    "NaN": post(b'{"prompts": ["a"], "completions": ["b"], "columns": {"x": [NaN]}}'),
}
BODIES: list[Any] = [
    None,
    [],
    1,
    "x",
    {},
    {"prompts": []},
    {"prompts": ["a"], "completions": []},
    {"prompts": "a", "completions": "b"},
    {"prompts": [1], "completions": ["b"]},
    {"prompts": [None], "completions": [None]},
    {"prompts": [[]], "completions": [[]]},
    {"prompts": ["a"], "completions": ["b"], "columns": []},
    {"prompts": ["a"], "completions": ["b"], "columns": {"x": 1}},
    {"prompts": ["a"], "completions": ["b"], "columns": {"prompts": ["x"]}},
    {"prompts": ["a"], "completions": ["b"], "more": 1},
    {"prompts": [[{"role": 1, "content": "x"}]], "completions": ["b"]},
    {"prompts": [[{"role": "user"}]], "completions": ["b"]},
    {"prompts": ["a"], "completions": [[{"role": "assistant", "content": {"x": 1}}]]},
    {"prompts": ["a"], "completions": ["b"], "columns": {"": ["x"]}},
    {"prompts": ["a"], "completions": ["b"], "columns": {"log_extra": [1]}},
]
RAW |= {f"body {i}": post(json.dumps(body).encode()) for i, body in enumerate(BODIES)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The command itself, with few files to open, and what it says on standard error."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "rewards.py").write_text(
        "def lengths(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
        "from tunesmith.cli.main import app; app()"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "serve-reward",
        "rewards.py:lengths",
        "--port",
        "0",
        "--max-request-mb",
        "1",
    ]
    errors = (folder / "errors").open("w")
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split(" at ")[1].split("/reward")[0], folder / "errors"
        process.terminate()
    errors.close()


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


def ask(url: str) -> tuple[int, Any]:
    connection = HTTPConnection(*address(url), timeout=20)
    connection.request("POST", "/reward", GOOD, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def send(url: str, data: bytes, wait: float = 0.5) -> bytes:
    with socket.create_connection(address(url), timeout=10) as connection:
        connection.settimeout(wait)
        answer = b""
        with suppress(OSError):
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        return answer


@pytest.mark.parametrize("kind", RAW)
def test_what_is_sent(kind: str, server: tuple[str, Path]) -> None:
    url, errors = server
    answer = send(url, RAW[kind])
    status = int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0
    assert status < 500, answer[:300]
    if "rebound" in kind or kind.startswith("body"):
        assert (
            400 <= status < 500 or b'"rewards"' in answer or BODIES[int(kind.split()[-1])] is None
        )
    assert ask(url) == (200, {"rewards": [3.0]})
    assert "Traceback" not in errors.read_text(), errors.read_text()[-2000:]


def test_half_open_connections_starve_nobody(server: tuple[str, Path]) -> None:
    url, errors = server
    held: list[socket.socket] = []
    for number in range(200):
        held.append(socket.create_connection(address(url), timeout=10))
        with suppress(OSError):
            held[-1].sendall(RAW["half a head"] if number % 2 else RAW["less than it says"])
    assert ask(url) == (200, {"rewards": [3.0]})
    for connection in held:
        connection.close()
    assert len(errors.read_text()) < 2000


def test_random_bytes(server: tuple[str, Path]) -> None:
    url, errors = server
    draw = random.Random(SEED)
    for _ in range(int(os.environ.get("TRIES_COUNT", "60"))):
        data = bytearray(draw.choice([*RAW.values(), post(GOOD)])[:5000])
        for _ in range(draw.randrange(1, 8)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        answer = send(url, bytes(data), 0.2)
        assert not answer.startswith(b"HTTP/") or int(answer.split(b" ")[1]) < 500, (
            bytes(data),
            answer[:300],
        )
    assert ask(url)[0] == 200 and "Traceback" not in errors.read_text()


ANSWERS: dict[str, Any] = {
    "no JSON": "x",
    "empty": "",
    "null": "null",
    "list": "[1.0]",
    "number": "1",
    "text": '"x"',
    "no rewards": "{}",
    "rewards null": '{"rewards": null}',
    "too few": '{"rewards": []}',
    "too many": '{"rewards": [1, 2, 3]}',
    "text reward": '{"rewards": ["1", 2]}',
    "NaN": '{"rewards": [NaN, 1]}',
    "infinite": '{"rewards": [Infinity, 1]}',
    "huge": '{"rewards": [1e300, 1]}',
    "huge integer": '{"rewards": [' + "9" * 4000 + ", 1]}",
    "longer integer": '{"rewards": [' + "9" * 5000 + ", 1]}",
    "nested": '{"rewards": [[1], 1]}',
    "object": '{"rewards": [{}, 1]}',
    "true": '{"rewards": [true, false]}',
    "none": '{"rewards": [null, null]}',
    "errors text": '{"rewards": [1, 1], "errors": "x"}',
    "errors short": '{"rewards": [1, 1], "errors": ["x"]}',
    "errors odd": '{"rewards": [1, 1], "errors": [{}, 7]}',
    "deep": "[" * 100_000,
    "deep rewards": '{"rewards": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "surrogate": '{"rewards": ["\\ud800", 1]}',
    "not UTF-8": b'{"rewards": [1, "\xff"]}',
    "large": b'{"rewards": [1, 1], "x": "' + b"y" * 3_000_000 + b'"}',
    "duplicate": '{"rewards": [1, 1], "rewards": 1}',
}
STATUSES = (100, 204, 301, 307, 400, 401, 403, 404, 408, 413, 418, 429, 500, 502, 503, 599)


def scored(url: str) -> list[Rollout]:
    entry = RemoteReward(urls=(url,), timeout=3.0, retries=1)
    rewards = RewardSet({"remote": 1.0}, 1.0)
    rewards.add(remote_reward(entry, "answer", lambda ids: str(ids)))
    played = [Rollout(Task(f"t{i}", "q", (1,), {})) for i in range(2)]
    for one in played:
        one.act(Completion([1], [0.0], [0], "stop"))
    asyncio.run(rewards.score(played, ["a", "b"]))
    return played


@pytest.mark.parametrize("kind", [*ANSWERS, *(f"status {s}" for s in STATUSES)])
def test_what_is_answered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.001)

    def answer(*_: Any) -> web.Response:
        if kind in ANSWERS:
            body = ANSWERS[kind]
            return web.Response(
                body=body if isinstance(body, bytes) else body.encode(),
                content_type="application/json",
            )
        status = max(200, int(kind.split()[1]))
        return web.Response(
            status=status, text="http://me:S3CRET@x/?key=S3CRET", headers={"Location": "/reward"}
        )

    begun = time.monotonic()
    with answering(answer) as seen:
        for one in scored(seen.url.replace("http://", "http://me:S3CRET@") + "?key=S3CRET"):
            assert one.status is Status.OK or one.status is Status.REWARD_FAILED
            assert one.status is not Status.OK or (
                one.reward is not None and abs(one.reward) <= 1e15
            )
            assert "S3CRET" not in str(one.error) and len(str(one.error)) < 2000
    assert time.monotonic() - begun < 60
