"""Rewards behind HTTP: what is sent, who is asked, what is tried again, and what every failure
becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support import tiny
from tests.support.http_servers import answering, running, unused_url
from tests.support.tiny_runs import rl_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import RemoteReward, RewardSection, RLConfig
from tunesmith.errors import ConfigError, RewardError
from tunesmith.learn.rewards import remote as module
from tunesmith.learn.rewards.function import ItemFailure, RewardFunction, required_columns
from tunesmith.learn.rewards.loading import check_rewards, load_rewards
from tunesmith.learn.rewards.remote import pause, remote_reward, scores_of
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.records import http_client
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.types import Completion, Rollout, Status, Task


def rollout(name: str = "t", prompt: Any = "2+2=", **columns: Any) -> Rollout:
    made = Rollout(Task(name, prompt, (1, 5), columns))
    made.observe((1, 5))
    made.act(Completion([7, 2], [0.0, 0.0], [0, 0], "stop"))
    return made


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def score(
    urls: Sequence[str], texts: Sequence[str], rollouts: Sequence[Rollout] = (), **keys: Any
) -> list[Rollout]:
    """Rollouts with these completions, scored by the servers."""
    played = list(rollouts) or [rollout(f"t{i}") for i in range(len(texts))]
    rewards = RewardSet({"remote": 1.0}, 60.0)
    rewards.add(remote_reward(RemoteReward(urls=tuple(urls), **keys), "answer", decode))
    asyncio.run(rewards.score(played, texts))
    return played


def lengths(body: Any, number: int) -> Any:
    del number
    return {"rewards": [float(len(c)) for c in body["completions"]]}


def test_servers_get_what_functions_get_in_parts() -> None:
    played = [rollout(answer="4", level=1), rollout(prompt="1+1="), rollout(answer="9", day=float)]
    with answering(lengths) as server:
        score([server.url], ["a", "bb", "ccc"], played, batch_size=2)
    assert [r.reward for r in played] == [1.0, 2.0, 3.0]
    assert played[0].rewards == {"remote": 1.0}
    first, second = sorted(server.bodies, key=lambda body: len(body["prompts"]), reverse=True)
    assert first == {
        "prompts": ["2+2=", "1+1="],
        "completions": ["a", "bb"],
        "columns": {"answer": ["4", None], "level": [1, None]},
        "finish_reasons": ["stop", "stop"],
    }
    assert second["completions"] == ["ccc"] and second["columns"]["day"] == ["<class 'float'>"]


def test_conversations_are_sent_as_messages() -> None:
    prompt = [{"role": "user", "content": "hi"}]
    with answering(lambda body, _: {"rewards": [len(body["completions"][0])]}) as server:
        (one,) = score([server.url], ["yes"], [rollout(prompt=prompt)])
    assert one.reward == 1.0
    assert server.bodies[0]["prompts"] == [prompt]
    assert server.bodies[0]["completions"] == [[{"role": "assistant", "content": "yes"}]]


def test_what_only_models_need_is_sent_too() -> None:
    """How each completion ended, and the tools that its prompt describes."""
    tool = {"type": "function", "function": {"name": "add"}}
    played = [rollout(), rollout()]
    played[0].task = replace(played[0].task, tools=[tool])
    played[1].act(Completion([7], [0.0], [0], "length"))
    with answering(lengths) as server:
        score([server.url], ["a", "b"], played)
    (body,) = server.bodies
    assert body["finish_reasons"] == ["stop", "length"] and body["tools"] == [[tool], None]


def test_openrlhf_protocol_sends_the_policys_own_text() -> None:
    played = [rollout(answer="4"), rollout()]
    with answering(
        lambda body, _: {"rewards": [0.5] * len(body["query"]), "extra_logs": {}}
    ) as server:
        score([server.url], ["a", "b"], played, protocol="openrlhf")
    assert server.bodies == [
        {"query": ["1 5 7 2"] * 2, "prompts": ["1 5"] * 2, "labels": ["4", ""]}
    ]
    assert [r.reward for r in played] == [0.5, 0.5]


def test_the_load_is_shared() -> None:
    with answering(lengths) as a, answering(lengths) as b, answering(lengths) as c:
        score([a.url, b.url, c.url], ["x"] * 9, batch_size=1)
        assert [len(s.bodies) for s in (a, b, c)] == [3, 3, 3]


def test_requests_one_after_the_other_take_turns() -> None:
    with answering(lengths) as a, answering(lengths) as b:
        rewards = RewardSet({"remote": 1.0}, 60.0)
        rewards.add(remote_reward(RemoteReward(urls=(a.url, b.url)), "answer", decode))
        for _ in range(6):
            asyncio.run(rewards.score([rollout()], ["x"]))
        assert len(a.bodies) == len(b.bodies) == 3


def test_a_server_that_fails_twice_is_tried_again() -> None:
    def failing(body: Any, number: int) -> Any:
        return web.Response(status=503, text="warming up") if number < 3 else lengths(body, number)

    with answering(failing) as server:
        (one,) = score([server.url], ["abc"], retries=2)
        assert len(server.bodies) == 3
    assert one.reward == 3.0


def test_what_one_server_cannot_do_another_does() -> None:
    with answering(lengths) as server:
        played = score([unused_url(), server.url], ["abc"] * 6, batch_size=1)
        assert len(server.bodies) == 6
    assert [r.reward for r in played] == [3.0] * 6


def test_a_dead_server_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing outstanding, which would draw every request to it."""
    monkeypatch.setattr(module, "pause", lambda failures: 0.0 if failures == 0 else 60.0)
    monkeypatch.setattr(module.asyncio, "sleep", real_quick(asyncio.sleep))
    asked: list[int] = []

    def down(body: Any, number: int) -> web.Response:
        del body
        asked.append(number)
        return web.Response(status=500)

    with answering(down) as dead, answering(lengths) as server:
        rewards = RewardSet({"remote": 1.0}, 60.0)
        rewards.add(remote_reward(RemoteReward(urls=(dead.url, server.url)), "answer", decode))
        for _ in range(5):
            asyncio.run(rewards.score([rollout()], ["x"]))
        assert len(asked) == 1 and len(server.bodies) == 5


def real_quick(sleep: Any) -> Any:
    return lambda seconds: sleep(min(seconds, 0.001))


def test_pauses_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.25)
    for failures, most in ((1, 0.25), (2, 0.5), (3, 1.0), (6, 8.0), (50, 8.0)):
        drawn = [pause(failures) for _ in range(50)]
        assert most / 2 <= min(drawn) < max(drawn) <= most


def test_a_server_that_is_down_is_a_failure_that_names_it() -> None:
    a = unused_url()
    b = unused_url()
    played = score([a, b], ["x", "y"], retries=3)
    for r in played:
        assert r.status is Status.REWARD_FAILED and r.reward is None and not r.rewards
        assert r.error and "had no answer from" in r.error and a in r.error and b in r.error
        assert "4 attempts" in r.error and "the reward 'remote'" in r.error


def test_a_slow_server_is_a_timeout_that_names_it() -> None:
    async def slow(body: Any, number: int) -> Any:
        await asyncio.sleep(600)
        return lengths(body, number)

    with answering(slow) as server:
        (one,) = score([server.url], ["x"], timeout=0.05, retries=1)
    assert one.status is Status.TIMED_OUT and one.reward is None
    assert one.error and f"{server.url} did not answer within 0.05 s (2 attempts" in one.error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"rewards": [1.0]}, "returned 1 rewards for 2 completions"),
        ({"rewards": 1.0}, "returned 1.0 (of type float); expected a list of 2"),
        (
            {"reward": [1.0, 2.0]},
            'answered {"reward": [1.0, 2.0]}; expected {"rewards": [2 numbers]}',
        ),
        ([1.0, 2.0], "answered [1.0, 2.0]"),
        (web.Response(text="<html>"), "did not answer with JSON: <html>"),
        (web.Response(status=400, text="no such column"), "answered 400: no such column"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "answered 302"),
        ({"rewards": [1.0, 2.0], "errors": ["x"]}, 'answered "errors" that are not a list of 2'),
    ],
)
def test_an_answer_that_would_not_change_is_not_asked_for_again(answer: Any, words: str) -> None:
    with answering(lambda *_: answer) as server:
        played = score([server.url], ["x", "y"])
        assert len(server.bodies) == 1
    for r in played:
        assert r.status is Status.REWARD_FAILED and r.reward is None
        assert r.error and server.url in r.error and words in r.error


def test_an_item_that_cannot_be_used_fails_alone() -> None:
    """NaN, text and the server's own error each name the server; null does not apply."""
    body = (
        '{"rewards": [1.5, NaN, "1", null, null], "errors": [null, null, null, null, "too long"]}'
    )
    answer = lambda *_: web.Response(text=body, content_type="application/json")  # noqa: E731
    with answering(answer) as server:
        played = score([server.url], ["x"] * 5)
    assert [r.reward for r in played] == [1.5, None, None, None, None]
    errors = [r.error or "" for r in played]
    assert f"{server.url} returned nan" in errors[1] and f"{server.url} returned '1'" in errors[2]
    assert "no reward function applies" in errors[3] and f"{server.url}: too long" in errors[4]
    assert played[3].rewards == {"remote": None} and not played[4].rewards


def test_scores_of_takes_whole_numbers_and_truth_values() -> None:
    assert scores_of({"rewards": [1, True, None]}, 3, "u") == [1.0, 1.0, None]
    assert isinstance(scores_of({"rewards": [10**400]}, 1, "u")[0], ItemFailure)


def test_several_rewards_are_mixed_by_weight() -> None:
    def brief(completions: list[str]) -> list[float]:
        return [1.0 / len(c) for c in completions]

    function = RewardFunction("brief", "rewards.py:brief", brief, required_columns(brief, "brief"))
    with (
        answering(lengths) as a,
        answering(lambda body, _: {"rewards": [None] * len(body["prompts"])}) as b,
    ):
        rewards = RewardSet({"brief": 2.0, "a": 0.5, "b": 1.0}, 60.0)
        rewards.add(function)
        rewards.add(remote_reward(RemoteReward(urls=(a.url,), name="a"), "answer", decode))
        rewards.add(remote_reward(RemoteReward(urls=(b.url,), name="b"), "answer", decode))
        one = rollout()
        asyncio.run(rewards.score([one], ["abcd"]))
        rewards.close()
    assert one.rewards == {"brief": 0.25, "a": 4.0, "b": None}
    assert one.reward == 2.0 * 0.25 + 0.5 * 4.0


def refused(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_rewards(RewardSection(**keys), Path.cwd())
    return str(caught.value)


def test_sections_that_cannot_work_are_refused(tmp_path: Path) -> None:
    one = RemoteReward(urls=("http://localhost:1/reward",))
    assert "reward.functions is empty" in refused()
    assert "urls is empty" in refused(remote=(RemoteReward(urls=()),))
    assert "the same name" in refused(remote=(one, one))
    assert "the same name" in refused(
        functions=("math",), remote=(one.model_copy(update={"name": "math"}),)
    )
    both = one.model_copy(update={"urls": ("http://u:S3CRET@a/",), "token_env": "HOME"})
    message = refused(remote=(both,))
    assert "Authorization" in message and "S3CRET" not in message
    assert "all 0" in refused(remote=(one.model_copy(update={"weight": 0.0}),))
    check_rewards(RewardSection(remote=(one,)), tmp_path)
    section = RewardSection(
        functions=("math",),
        weights=(2.0,),
        remote=(one, one.model_copy(update={"name": "b", "weight": 3.0})),
    )
    assert load_rewards(section, tmp_path).weights == {"math": 2.0, "remote": 1.0, "b": 3.0}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('[{urls = ["localhost:80"]}]', ["reward.remote[0].urls", "'localhost:80' is not a URL"]),
        ('[{urls = ["http://localhost:99999/"]}]', ["is not a URL"]),
        ('[{urls = ["http://a/"], retry = 3}]', ["reward.remote[0].retry", "retries"]),
        (
            '[{urls = ["http://a/"], protocol = "trl"}]',
            ["reward.remote[0].protocol", "'tunesmith', 'openrlhf'"],
        ),
        ("[{}]", ["reward.remote[0].urls is missing"]),
        ('[{urls = ["http://a/#b"]}]', ["is not a URL", "without #"]),
        ('[{urls = ["http://u:a b@c/"]}]', ["is not a URL", "***"]),
    ],
)
def test_run_files_are_refused_by_key(tmp_path: Path, said: str, words: list[str]) -> None:
    model = tiny.save_model(tmp_path / "model")
    settings = [s for s in rl_settings(tmp_path, model) if not s.startswith("reward.")]
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, None, [*settings, f"reward.remote={said}"])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def remote_settings(folder: Path, model: Path, url: str, **changed: Any) -> list[str]:
    keys = {"reward__functions": None, "train__steps": 2, **changed}
    return [
        *rl_settings(folder, model, **keys),
        f'reward.remote=[{{urls = ["{url}"], retries = 1}}]',
    ]


def test_a_run_with_a_remote_reward(tmp_path: Path, model: Path) -> None:
    with answering(lengths) as server:
        outcome = assembly.run_rl(None, remote_settings(tmp_path, model, server.url))
    lines = read_metrics(outcome.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert sum(len(body["completions"]) for body in server.bodies) == 2 * 16
    mean = sum(len(c) for body in server.bodies for c in body["completions"]) / 32
    assert sum(line["reward/remote/mean"] for line in lines) / 2 == pytest.approx(mean)
    assert server.bodies[0]["columns"]["answer"]


def test_a_run_whose_server_is_down_stops_or_goes_on_as_configured(
    tmp_path: Path, model: Path
) -> None:
    url = unused_url()
    with pytest.raises(RewardError) as caught:
        assembly.run_rl(None, remote_settings(tmp_path, model, url, run="stops"))
    assert "16 of 16 rollouts failed (16 reward_failed)" in str(caught.value) and url in str(
        caught.value
    )
    outcome = assembly.run_rl(
        None, remote_settings(tmp_path, model, url, run="on", reward__max_failed_share=1.0)
    )
    lines = read_metrics(outcome.run_dir / "metrics.jsonl")
    assert [line["rollouts/failed"] for line in lines] == [1.0, 1.0]
    assert [line["optimizer_steps"] for line in lines] == [0.0, 0.0]


def test_no_password_of_an_address_is_in_a_message() -> None:
    address = unused_url().replace("http://", "http://me:S3CRET@") + "?key=S3CRET"
    (one,) = score([address], ["x"], retries=1)
    assert (
        one.status is Status.REWARD_FAILED
        and "S3CRET" not in str(one.error)
        and "127.0.0.1" in str(one.error)
    )
    with answering(lambda *_: {"rewards": ["x"], "errors": None}) as server:
        (one,) = score([server.url + "?key=S3CRET"], ["x"])
    assert "S3CRET" not in str(one.error) and "key=***" in str(one.error)
    with pytest.raises(ValueError) as refused:
        RemoteReward(urls=("ftp://me:S3CRET@host/",))
    assert "S3CRET" not in str(refused.value.__cause__ or refused.value.errors()[0]["msg"])  # type: ignore[attr-defined]


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES", 1000)

    def endless(*_: Any) -> Any:
        return web.Response(body=b'{"rewards": [1.0], "x": "' + b"y" * 10_000_000)

    with answering(endless) as server:
        (one,) = score([server.url], ["x"])
        assert len(server.bodies) == 1
    assert one.status is Status.REWARD_FAILED and "bytes" in str(one.error)


def test_deeply_nested_json_either_way_is_a_failure() -> None:
    deep: Any = []
    for _ in range(20_000):
        deep = [deep]
    with answering(lambda *_: web.Response(text="[" * 100_000)) as server:
        (one,) = score([server.url], ["x"])
        assert one.status is Status.REWARD_FAILED and "with JSON" in str(one.error)
        (one,) = score([server.url], ["x"], [rollout(column=deep)])
        assert one.status is Status.REWARD_FAILED and "cannot be sent" in str(one.error)


def test_the_token_of_an_environment_variable_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"rewards": [1.0]})

    app = web.Application()
    app.add_routes([web.post("/reward", handle)])
    section = RewardSection(
        remote=(RemoteReward(urls=("http://host/",), token_env="REWARD_TOKEN_HERE"),)
    )
    monkeypatch.delenv("REWARD_TOKEN_HERE", raising=False)
    with pytest.raises(ConfigError, match="REWARD_TOKEN_HERE"):
        check_rewards(section, Path())
    monkeypatch.setenv("REWARD_TOKEN_HERE", "abc\n")
    check_rewards(section, Path())
    with running(app) as url:
        score([f"{url}/reward"], ["x"], token_env="REWARD_TOKEN_HERE")
    assert seen == ["Bearer abc"]
