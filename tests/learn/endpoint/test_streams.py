"""Streamed answers: sent while they are sampled, whole at the end, and dropped with their client."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.episodes import PausingEngine, check_tokens, load, made_task, ok, play
from tunesmith.errors import EpisodeError
from tunesmith.learn.endpoint.asks import Ask
from tunesmith.learn.endpoint.turns import Spoken, without_beginning
from tunesmith.learn.environments.conversation import Reply, before_stop
from tunesmith.learn.environments.tools import (
    marks_of,
    parse_hermes,
    parse_llama,
    parse_mistral,
)
from tunesmith.types import Completion, Status

AGENT = """
import aiohttp, asyncio, json

PATHS = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Go."}]}),
    "text": ("completions", {"prompt": "Once"}),
    "responses": ("responses", {"input": "Go."}),
    "messages": ("messages", {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 90}),
}
TEXTS = {
    "chat": lambda e: e["choices"][0]["delta"].get("content") or "",
    "text": lambda e: e["choices"][0]["text"],
    "responses": lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
    "messages": lambda e: e["delta"]["text"] if e["type"] == "content_block_delta" else "",
}

async def agent(base_url, how, seen, **columns):
    async with aiohttp.ClientSession() as http:
        return await globals()[how](http, base_url, columns["api"], seen)

async def events(answer):
    async for line in answer.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\\n":
            yield json.loads(line[6:])

async def follows(http, base_url, api, seen):
    path, body = PATHS[api]
    async with http.post(f"{base_url}/{path}", json={**body, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream", await answer.text()
        async for event in events(answer):
            seen.append(event)
            if TEXTS[api](event) and not seen[0].go_on.is_set():
                assert seen[0].running == 1, "it came while the policy writes"
                seen[0].go_on.set()
    return float("".join(map(TEXTS[api], seen[1:])) == "one two three four")

async def hangs_up(http, base_url, api, seen):
    path, body = PATHS[api]
    answer = await http.post(f"{base_url}/{path}", json={**body, "stream": True})
    async for event in events(answer):
        if TEXTS[api](event):
            break
    answer.close()
    while seen[0].running:
        await asyncio.sleep(0.01)
    seen[0].go_on.set()
    if api == "alone":
        return 1.0
    async with http.post(f"{base_url}/{path}", json=body) as whole:
        assert whole.status == 200, await whole.text()
    return 1.0

async def leaves(http, base_url, api, seen):
    answer = await http.post(f"{base_url}/chat/completions", json={**PATHS["chat"][1], "stream": True})
    await anext(aiter(events(answer)))
    answer.close()
    while seen[0].running:
        await asyncio.sleep(0.01)
    return 1.0

async def breaks(http, base_url, api, seen):
    path, body = PATHS[api]
    async with http.post(f"{base_url}/{path}", json={**body, "stream": True}) as answer:
        async for event in events(answer):
            seen.append(event)
            if TEXTS.get(api)(event) if "error" not in event else False:
                seen[0].broken = "the engine broke"
                seen[0].go_on.set()
    return 0.0
"""
APIS = ("chat", "text", "responses", "messages")


class BreakingEngine(PausingEngine):
    broken = ""

    async def between(self, written: int) -> None:
        await super().between(written)
        if self.broken:
            from tunesmith.errors import EngineError

            raise EngineError(self.broken)


class Seen(list[Any]):
    """The engine, and the events; an agent would get a copy of a plain list."""

    def __deepcopy__(self, _: Any) -> Seen:
        return self


def streamed(
    tokenizer: Any, folder: Path, how: str, api: str, kind: type[PausingEngine] = PausingEngine
) -> tuple[Any, Any, list[Any]]:
    seen = Seen()
    environments = load(folder, AGENT, path="env.py:agent")
    task = made_task(tokenizer, how=how, api=api, seen=seen, engine=seen.append)
    text = "one two three four<|im_end|>"
    (rollout,), engine = play(
        environments, tokenizer, [task], lambda _: text, kind=kind, timeout=8.0
    )
    return rollout, engine, seen


@pytest.mark.parametrize("api", APIS)
def test_text_comes_while_it_is_sampled(api: str, tokenizer: Any, tmp_path: Path) -> None:
    rollout, engine, seen = streamed(tokenizer, tmp_path, "follows", api)
    check_tokens(ok(rollout), engine)
    assert rollout.reward == 1.0
    kinds = [event.get("type") for event in seen[1:]]
    if api == "messages":
        assert list(dict.fromkeys(kinds)) == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert seen[-2]["delta"]["stop_reason"] == "end_turn"
        assert seen[-2]["usage"]["output_tokens"] == sum(rollout.records[-1].sampled)
    if api == "responses":
        assert [event["sequence_number"] for event in seen[1:]] == list(range(len(seen) - 1))
        assert list(dict.fromkeys(k.removeprefix("response.") for k in kinds)) == [
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        assert seen[-1]["response"]["output"][0]["content"][0]["text"] == "one two three four"


@pytest.mark.parametrize("api", APIS)
def test_a_client_that_hangs_up_leaves_nothing(api: str, tokenizer: Any, tmp_path: Path) -> None:
    rollout, engine, _ = streamed(tokenizer, tmp_path, "hangs_up", api)
    check_tokens(ok(rollout), engine)
    assert len(engine.exchanges) == 1, "the first request was not finished"
    assert [len(record.turns) for record in rollout.records if record.turns] == [1]
    assert rollout.metrics["turns"] == 2, "it counts as a turn, so that no client goes on for ever"


def test_an_episode_whose_only_client_hung_up_fails(tokenizer: Any, tmp_path: Path) -> None:
    rollout, engine, _ = streamed(tokenizer, tmp_path, "leaves", "chat")
    assert rollout.status is Status.ENVIRONMENT_FAILED and not engine.exchanges
    assert rollout.num_sampled == 0


@pytest.mark.parametrize("api", APIS)
def test_an_error_in_the_middle_is_an_event(api: str, tokenizer: Any, tmp_path: Path) -> None:
    rollout, _, seen = streamed(tokenizer, tmp_path, "breaks", api, BreakingEngine)
    assert "the engine broke" in seen[-1]["error"]["message"]
    assert rollout.status is Status.ENGINE_FAILED


class Words:
    """Each character is a token."""

    def plain(self, ids: Any) -> str:
        return "".join(map(chr, ids)).replace("[TOOL_CALLS]", "").replace("<|python_tag|>", "")

    def verbatim(self, ids: Any) -> str:
        return "".join(map(chr, ids))


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("parse", "text", "stop"),
    [
        (parse_hermes, f" Let me see. \n{CALL} {CALL}", ()),
        (parse_hermes, f"<think>a {CALL} b</think> so\n{CALL}", ()),
        (parse_hermes, "a < b <tool_cal no", ()),
        (parse_hermes, "  only text  ", ()),
        (parse_llama, '{"name": "f", "parameters": {}}', ()),
        (parse_llama, 'Look: <|python_tag|>{"name": "f", "parameters": {}}', ()),
        (parse_llama, "a {brace} and more", ()),
        (parse_mistral, 'Look: [TOOL_CALLS][{"name": "f", "arguments": {}}]', ()),
        (None, "one STO two STOP three", ("STOP", "\n\n")),
        (None, "ends with a part ST", ("STOP",)),
    ],
)
def test_the_pieces_are_the_reply(parse: Any, text: str, stop: tuple[str, ...]) -> None:
    policy: Any = SimpleNamespace(renderer=Words(), marks=marks_of(parse) if parse else ())
    ask = Ask(tools=[{}] if parse else None, stop=stop)
    draw = random.Random(0)
    content = text if parse is None else parse(text, Words().plain(map(ord, text)))[0]
    content = before_stop(content, stop)
    ids = list(map(ord, text))
    completion = Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
    reply = Reply({"role": "assistant", "content": content}, text, [], 1, completion)
    for _ in range(20):
        spoken = Spoken(0, ask, policy)
        held = [0]

        class Growing:
            def beyond(self, known: int, held: list[int] = held) -> Any:
                new = ids[known : held[0]]
                return new, [0.0] * len(new), [0] * len(new)

        spoken.follow(Growing())
        pieces = []
        while held[0] < len(ids):
            held[0] += draw.randint(1, 5)
            piece = spoken.more()
            pieces += [piece.text] if piece else []
        assert "".join(pieces) + spoken.rest(reply).text == content


def test_a_completion_that_began_anew_is_not_taken_for_the_same() -> None:
    policy: Any = SimpleNamespace(renderer=Words(), marks=())
    spoken = Spoken(0, Ask(), policy)
    first = SimpleNamespace(beyond=lambda _: ([97, 98], [0.0, 0.0], [0, 0]))
    spoken.follow(first)
    assert spoken.more()
    spoken.follow(SimpleNamespace(beyond=lambda _: 1 / 0))
    other = Completion([97, 99], [0.0, 0.0], [1, 1], "stop")
    with pytest.raises(EpisodeError, match="anew"):
        spoken.rest(Reply({"content": "ac"}, "ac", [], 1, other))


def test_without_beginning() -> None:
    assert without_beginning("one ST", ("STOP",)) == "one "
    assert without_beginning("one STO x", ("STOP",)) == "one STO x"
    assert without_beginning("STO", ("TOP", "STOP")) == ""
    assert without_beginning("", ()) == ""
