"""``tunesmith serve-reward``: batches across requests, bad requests, and the command as a process
of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from tests.support import forks, tiny
from tests.support.documents import ROOT
from tests.support.http_servers import running
from tests.support.tiny_rewards import direct_scores
from tunesmith.cli.main import app
from tunesmith.config.schema import ModelReward, RemoteReward
from tunesmith.errors import ConfigError
from tunesmith.learn.data.chat import HERMES
from tunesmith.learn.rewards.function import RewardFunction, required_columns
from tunesmith.learn.rewards.model import model_reward
from tunesmith.learn.rewards.remote import remote_reward
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.rewards.server import RewardService, make_app
from tunesmith.records.addresses import is_loopback
from tunesmith.records.http_server import Limits, listen
from tunesmith.run.assembly.serve_reward import ServeOptions, read_token, serve_reward
from tunesmith.run.specs.scorers import ScorerSpec
from tunesmith.types import Completion, Message, Rollout, Status, Task


@contextmanager
def service(function: RewardFunction, window: float = 0.0, max_bytes: int = 2**20) -> Iterator[str]:
    rewards = RewardSet({function.name: 1.0}, 60.0)
    rewards.add(function)
    with running(make_app(RewardService(rewards, window), max_bytes)) as url:
        yield url
    rewards.close()


def function_of(f: Any) -> RewardFunction:
    return RewardFunction("f", "rewards.py:f", f, required_columns(f, "f"))


def ask(
    url: str, body: Any = None, path: str = "/reward", kind: str = "application/json"
) -> tuple[int, Any]:
    """Status and JSON of one request; a POST where there is a body."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=100)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, data, {"Content-Type": kind})
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found


def lengths(completions: list[str], **columns: Any) -> list[float]:
    del columns
    return [float(len(c)) for c in completions]


def test_a_model_gives_what_it_gives_directly_over_http(path: Path) -> None:
    model = ScorerSpec(ModelReward(path=str(path)), "float32", "cpu", 64).build()
    talk = [{"role": "user", "content": "2+2?"}]
    body = {
        "prompts": ["1+1?", talk, "x"],
        "completions": ["2", [{"role": "assistant", "content": "4"}], "y" * 600],
    }
    with service(model_reward("rm", model, exact=False, in_thread=True)) as url:
        status, answer = ask(url, body)
    assert status == 200
    expected = direct_scores(path, [model.encode("1+1?", "2"), model.encode("2+2?", "4")])
    assert answer["rewards"] == [*(pytest.approx(score, abs=1e-5) for score in expected), None]
    assert (
        answer["errors"][:2] == [None, None] and "the model's context is 512" in answer["errors"][2]
    )


def test_a_model_is_told_what_ended_and_which_tools_there_are(tmp_path: Path, path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HERMES.read_text(encoding="utf-8")
    shutil.copytree(path, tmp_path / "hermes")
    tokenizer.save_pretrained(tmp_path / "hermes")
    model = ScorerSpec(ModelReward(path=str(tmp_path / "hermes")), "float32", "cpu", 512).build()
    body = {
        "prompts": ["1+1?"] * 3,
        "completions": ["2"] * 3,
        "finish_reasons": ["stop", "length", "stop"],
        "tools": [None, None, [tool]],
    }
    with service(model_reward("rm", model, exact=False, in_thread=True)) as url:
        status, answer = ask(url, body)
    expected = direct_scores(
        path,
        [
            model.encode("1+1?", "2"),
            model.encode("1+1?", "2", finished=False),
            model.encode("1+1?", "2", tools=[tool]),
        ],
    )
    assert status == 200 and len(set(expected)) == 3
    assert answer == {"rewards": pytest.approx(expected, abs=1e-5)}


def test_concurrent_requests_become_one_batch() -> None:
    """Seven that come while the first is scored are scored together, and each gets its own
    answer."""
    sizes: list[int] = []
    begun = threading.Event()
    go = threading.Event()

    def slow(completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        begun.set()
        assert go.wait(100)
        return lengths(completions)

    with service(function_of(slow)) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, url, {"prompts": ["p"], "completions": ["a"]})
        assert begun.wait(100)
        later = [
            pool.submit(ask, url, {"prompts": ["p"] * 2, "completions": ["b" * i, ""]})
            for i in range(7)
        ]
        while ask(url, path="/health")[1]["requests"] < 8:
            pass
        go.set()
        assert first.result() == (200, {"rewards": [1.0]})
        assert [f.result()[1]["rewards"] for f in later] == [[float(i), 0.0] for i in range(7)]
        health = ask(url, path="/health")[1]
    assert sizes == [1, 14]
    assert health == {
        "status": "ok",
        "reward": "rewards.py:f",
        "requests": 8,
        "completions": 15,
        "batches": 2,
    }


def test_another_method_says_which_are_allowed() -> None:
    with service(function_of(lengths)) as url:
        parts = urlsplit(url)
        with closing(HTTPConnection(parts.hostname or "", parts.port)) as connection:
            for method, path, allowed in (
                ("GET", "/reward", "POST"),
                ("POST", "/health", "GET, HEAD"),
            ):
                connection.request(method, path)
                answer = connection.getresponse()
                assert (answer.status, answer.headers["Allow"]) == (405, allowed) and answer.read()


def test_a_request_that_makes_the_function_raise_leaves_others_alone() -> None:
    begun = threading.Event()
    go = threading.Event()

    def picky(completions: list[str]) -> list[float]:
        begun.set()
        assert go.wait(100)
        if "bad" in completions:
            raise KeyError("bad")
        return lengths(completions)

    with service(function_of(picky)) as url, ThreadPoolExecutor(3) as pool:
        bodies = [{"prompts": ["p"], "completions": [text]} for text in ("first", "bad", "good")]
        first = pool.submit(ask, url, bodies[0])
        assert begun.wait(100)
        bad, good = (pool.submit(ask, url, body) for body in bodies[1:])
        while ask(url, path="/health")[1]["requests"] < 3:
            pass
        go.set()
        assert first.result()[1] == {"rewards": [5.0]} and good.result()[1] == {"rewards": [4.0]}
        answer = bad.result()[1]
    assert answer["rewards"] == [None] and "KeyError: 'bad'" in answer["errors"][0]


def test_columns_reach_the_function_and_null_does_not_apply() -> None:
    def equal(
        completions: list[str], answer: list[str | None], **columns: Any
    ) -> list[float | None]:
        del columns
        return [
            None if gold is None else float(c == gold)
            for c, gold in zip(completions, answer, strict=True)
        ]

    with service(function_of(equal)) as url:
        columns = {"answer": ["4", "5", None], "extra": [1, 2, 3]}
        body = {"prompts": ["p"] * 3, "completions": ["4", "4", "4"], "columns": columns}
        assert ask(url, body) == (200, {"rewards": [1.0, 0.0, None]})
        status, answer = ask(url, {"prompts": ["p"], "completions": ["4"]})
    assert status == 400 and "needs the column 'answer'" in answer["error"]


def test_a_conversation_with_calls_of_tools_is_scored() -> None:
    def brief(completions: list[list[Message]]) -> list[float]:
        return [float(c[-1]["content"] == "four") for c in completions]

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    parts = [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]
    talk = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": parts},
    ]
    with service(function_of(brief)) as url:
        body = {
            "prompts": [[{"role": "user", "content": parts}]] * 2,
            "completions": [talk, talk[:2]],
        }
        assert ask(url, body) == (200, {"rewards": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "Invalid JSON"),
        (b"\xff", "Invalid JSON"),
        (b"[" * 100_000, "recursion"),
        ([], "an object"),
        ({"prompts": ["p"]}, "completions: "),
        ({"prompts": ["p"], "completions": ["a", "b"]}, "'completions' has 2"),
        ({"prompts": ["p"], "completions": [1]}, "completions.0: "),
        ({"prompts": [[{"role": "user"}]], "completions": ["a"]}, "prompts.0: "),
        ({"prompts": ["p"], "completions": ["a"], "columns": []}, "columns: "),
        ({"prompts": ["p"], "completions": ["a"], "columns": {"x": [1, 2]}}, "'x' has 2"),
        (
            {"prompts": ["p"], "completions": ["a"], "columns": {"prompts": ["x"]}},
            "columns: 'prompts'",
        ),
        (
            {"prompts": ["p"], "completions": ["a"], "finish_reasons": ["eos"]},
            "finish_reasons.0: ",
        ),
        (
            {"prompts": ["p"], "completions": ["a"], "finish_reasons": ["stop"] * 2},
            "'finish_reasons' has 2",
        ),
        ({"prompts": ["p"], "completions": ["a"], "tools": [None, []]}, "'tools' has 2"),
        ({"prompts": ["p"], "completions": ["a"], "tools": ["add"]}, "tools.0"),
        ({"query": ["p"], "prompts": ["p"], "completions": ["a"]}, "query: "),
    ],
)
def test_bad_requests_are_told_what_is_wrong(body: Any, words: str) -> None:
    with service(function_of(lengths)) as url:
        status, answer = ask(url, body)
        assert status == 400 and words in answer["error"]
        assert ask(url, {"prompts": ["p"], "completions": ["abc"]}) == (200, {"rewards": [3.0]})


def test_other_refusals() -> None:
    with service(function_of(lengths), max_bytes=1000) as url:
        assert ask(url, {"prompts": ["p" * 1000], "completions": ["a"]})[0] == 413
        assert ask(url, b"{}", kind="text/plain")[0] == 415
        assert ask(url, {}, "/elsewhere")[0] == 404
        assert ask(url, path="/reward")[0] == 405
        assert ask(url, {"prompts": [], "completions": []}) == (200, {"rewards": []})


def test_a_run_gets_the_servers_errors_as_failures() -> None:
    def half(completions: list[str]) -> list[float]:
        return [float("nan") if c == "bad" else 1.0 for c in completions]

    played = [Rollout(Task("t", "p", (1,))) for _ in range(2)]
    for r in played:
        r.act(Completion([2], [0.0], [0], "stop"))
    with service(function_of(half)) as url:
        rewards = RewardSet({"remote": 1.0}, 60.0)
        rewards.add(remote_reward(RemoteReward(urls=(f"{url}/reward",)), "answer", str))
        asyncio.run(rewards.score(played, ["good", "bad"]))
    assert played[0].reward == 1.0
    assert played[1].status is Status.REWARD_FAILED and f"{url}/reward" in (played[1].error or "")
    assert "returned nan" in (played[1].error or "")


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command, what it said before it was ready, and its address."""
    command = [sys.executable, "-m", "tunesmith", "serve-reward", *arguments, "--port", "0"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with forks.popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        told = ""
        try:
            for line in server.stdout:
                told += line
                found = re.search(r"at (http://\S+)/reward", line)
                if found:
                    yield server, told, found[1]
                    break
            else:
                pytest.fail(f"it did not start: {told}")
        finally:
            server.kill()


@pytest.mark.slow
def test_the_command_serves_a_model_and_ends_on_sigterm(tmp_path: Path, path: Path) -> None:
    model = ScorerSpec(ModelReward(path=str(path)), "float32", "cpu", 64).build()
    (score,) = direct_scores(path, [model.encode("1+1?", "2")])
    with process(tmp_path, str(path), "--normalize", "--max-tokens", "64", "--window-ms", "1") as (
        server,
        told,
        url,
    ):
        assert f"serving {path} at http://127.0.0.1:" in told and "warning" not in told
        status, answer = ask(url, {"prompts": ["1+1?"], "completions": ["2"]})
        assert status == 200 and answer["rewards"] == [
            pytest.approx((score - 0.25) / 2.0, abs=1e-5)
        ]
        assert ask(url, path="/health")[1]["batches"] == 1
        server.send_signal(signal.SIGTERM)
        assert server.wait(100) == 0


@pytest.mark.slow
def test_the_documented_request_is_answered_as_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    said = re.search(
        r"curl (\S+) -H 'Content-Type: application/json' \\\n\s+-d '(.*?)'\n```", text, re.DOTALL
    )
    answer = re.search(r"^\{\"rewards\": \[.*\]\}$", text, re.MULTILINE)
    assert said and answer and said[1].endswith(":8100/reward")
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "rewards.py").write_text(code)
    with process(tmp_path, "rewards.py:same_text") as (server, _, url):
        assert ask(url, said[2].encode()) == (200, json.loads(answer[0]))
        server.send_signal(signal.SIGINT)
        assert server.wait(100) == 0


def test_addresses_that_others_can_reach_are_known() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("example.org")


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("nowhere", {}, "is no reward"),
        ("rewards.py:gone", {}, "has no function 'gone'"),
        ("rewards.py", {}, "names a file but no function"),
        ("rewards.py:ids", {}, "completion_ids"),
        ("rewards.py:f", {"normalize": True}, "--normalize has no meaning for a reward function"),
        ("rewards.py:f", {"max_tokens": 5}, "--max-tokens has no meaning"),
        ("regex_format", {}, "reward.pattern is missing"),
        ("rewards.py:f", {"sandbox": "procss"}, "procss"),
        (
            "code_tests",
            {"sandbox": '{ type = "http", url = "http://h", token_env = "NO_TOKEN" }'},
            "NO_TOKEN",
        ),
        ("rm", {"sandbox": "process"}, "--sandbox has no meaning for a reward model"),
        ("rm", {"timeout": 3.0}, "--timeout has no meaning for a reward model"),
        ("plain", {"normalize": True}, "reward_stats.json, which does not exist"),
        ("./gone", {}, "there is no model directory './gone'"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    options: dict[str, Any],
    words: str,
) -> None:
    (tmp_path / "rewards.py").write_text("def f(completions): ...\ndef ids(completion_ids): ...\n")
    (tmp_path / "rm").symlink_to(path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((path / "config.json").read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(words)):
        serve_reward(target, "127.0.0.1", 0, ServeOptions(**options))


def test_an_address_that_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards.py").write_text("def f(completions): ...\n")
    monkeypatch.chdir(tmp_path)
    with (
        service(function_of(lengths)) as url,
        pytest.raises(ConfigError, match="choose another --host or --port"),
    ):
        serve_reward("rewards.py:f", "127.0.0.1", urlsplit(url).port or 0, ServeOptions())


def test_the_command_checks_its_options() -> None:
    for option, value, valid in (
        ("--dtype", "float8", "'bfloat16'"),
        ("--device", "mps", "cpu or cuda"),
    ):
        found = CliRunner().invoke(app, ["serve-reward", "rm", option, value])
        assert found.exit_code == 2 and valid in found.output


def test_beyond_loopback_a_token_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made and printed where none is set; health is open and says little."""
    (tmp_path / "rewards.py").write_text(
        "def f(completions, **_): return [1.0] * len(completions)\n"
    )
    monkeypatch.delenv("TUNESMITH_REWARD_TOKEN", raising=False)
    with process(tmp_path, "rewards.py:f", "--host", "0.0.0.0") as (_, told, url):
        token = re.search(r"token: (\S+)", told)
        assert token
        local = url.replace("0.0.0.0", "127.0.0.1")
        body = {"prompts": ["p"], "completions": ["x"]}
        assert ask(local, body)[0] == 401 and ask(local, path="/health") == (200, {"status": "ok"})
        connection = HTTPConnection("127.0.0.1", urlsplit(local).port, timeout=100)
        for given, status in ((token[1] + "x", 401), ("", 401), (token[1], 200)):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {given}"}
            connection.request("POST", "/reward", json.dumps(body), headers)
            response = connection.getresponse()
            asked_for = {"Bearer"} if status == 401 else {None}
            assert {response.getheader("WWW-Authenticate")} == asked_for
            assert (response.status, bool(response.read())) == (status, True)


def test_a_token_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESMITH_REWARD_TOKEN", " abc\n")
    assert read_token(None) == "abc"
    (tmp_path / "token").write_text("def\n")
    assert read_token(tmp_path / "token") == "def"
    for text in ("", "two words", "\u00e9"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(ConfigError, match="token"):
            read_token(tmp_path / "token")
    with pytest.raises(ConfigError, match="token-file"):
        read_token(tmp_path / "gone")


def test_requests_for_other_names_are_refused_without_a_token() -> None:
    with service(function_of(lengths)) as url:
        port = urlsplit(url).port
        for host, status in (
            ("localhost", 200),
            (f"[::1]:{port}", 200),
            ("evil.example", 421),
            ("10.0.0.1", 421),
        ):
            connection = HTTPConnection("127.0.0.1", port, timeout=100)
            connection.request("GET", "/health", headers={"Host": host})
            assert connection.getresponse().status == status, host


def test_a_body_that_does_not_come_is_given_up() -> None:
    rewards = RewardSet({"f": 1.0}, 60.0)
    rewards.add(function_of(lengths))
    limits = Limits(
        head_seconds=0.1, body_seconds=0.2
    )  # the time for a head does not count while a body is read

    def status(port: int | None) -> int | None:
        connection = HTTPConnection("127.0.0.1", port, timeout=100)
        connection.putrequest("POST", "/reward")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        with suppress(
            ConnectionError, RemoteDisconnected
        ):  # on a busy machine the head may come too late as well
            connection.endheaders(b"{")
            return connection.getresponse().status
        return None

    with running(make_app(RewardService(rewards, 0.0), 2**20, limits)) as url:
        found = (status(urlsplit(url).port) for _ in range(100))
        assert next(filter(None, found)) == 408
    rewards.close()


def test_a_server_closes_what_says_nothing_and_makes_room() -> None:
    class Silent(asyncio.Protocol):
        pass

    async def run() -> list[bytes]:
        server = await listen(Silent, Limits(head_seconds=0.3, connections=2), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        first = await opened[0][0].read()  # closed for the third, long before its time
        rest = [await asyncio.wait_for(reader.read(), 100) for reader, _ in opened[1:]]
        for _, writer in opened:
            writer.close()
        server.close()
        return [first, *rest]

    assert asyncio.run(run()) == [b"", b"", b""]


def test_a_conversation_reaches_the_function_whole() -> None:
    def turns(completions: list[list[Message]]) -> list[float]:
        return [float(len(c)) for c in completions]

    talk = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    with service(function_of(turns)) as url:
        body = {"prompts": [[{"role": "user", "content": "q"}]], "completions": [talk]}
        assert ask(url, body) == (200, {"rewards": [3.0]})
