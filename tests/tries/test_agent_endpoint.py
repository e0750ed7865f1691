"""Random requests to the endpoint of agents: each gets an answer or a refusal in JSON, and none a
fault of ours."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import load, made_task, ok, play

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "400"))
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2,
    0.5,
    1e400,
    10**30,
    "",
    "x",
    "\ud800",
    "\0",
    "x" * 5000,
    [],
    [[]],
    [None],
    [1, 2],
    ["a"],
    {},
    {"type": "function"},
    {"role": "user"},
    [{"role": "user", "content": "hello"}],
    [{"role": 3}],
    {"a": [1]},
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
VALID: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stop": ["."],
        "n": 1,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stream": False,
        "temperature": 0.5,
        "stream_options": {"include_usage": True},
        "functions": None,
        "seed": 1,
        "user": "me",
    },
    "completions": {
        "prompt": "hello",
        "max_tokens": 3,
        "n": 1,
        "stop": "x",
        "logprobs": 1,
        "echo": True,
        "stream": False,
    },
    "responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": "auto",
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": [],
        "stream": False,
        "background": False,
    },
}
VALID["messages"] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
    ],
    "system": [{"type": "text", "text": "Be brief."}],
    "max_tokens": 3,
    "stop_sequences": ["."],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "stream": False,
}
RAW = [
    b"",
    b"{",
    b"[" * 300_000,
    b"\xff\xfe",
    b"null",
    b"[]",
    b'"x"',
    b"{" + b" " * 100_000 + b"}",
    b'{"messages": NaN}',
]
AGENT = """
async def agent(base_url, api_key, play, **columns):
    return await play(base_url)
"""


def changed(value: Any, draw: random.Random) -> Any:
    """``value`` with one random place in it replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.6:
        place = draw.randrange(len(value))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw.choice(ODD)


@pytest.mark.timeout(900)
def test_random_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level(template("qwen2"))
    environments = load(tmp_path, AGENT, path="env.py:agent", max_turns=10**6)
    draw = random.Random(SEED)
    answers: list[tuple[int, str, Any]] = []

    async def requests(base_url: str) -> float:
        import aiohttp

        async with aiohttp.ClientSession() as http:

            async def ask(path: str, **body: Any) -> None:
                try:
                    async with http.post(f"{base_url}/{path}", **body) as answer:
                        text = await answer.text()
                        answers.append((answer.status, answer.content_type, (path, body, text)))
                except aiohttp.ClientError as error:
                    answers.append((0, "", (path, body, repr(error))))

            for _ in range(COUNT):
                path = draw.choice(list(VALID))
                body = VALID[path]
                for _ in range(draw.choice((1, 1, 2, 3))):
                    body = changed(body, draw)
                await ask(path, json=body)
            for raw in RAW:
                for path in VALID:
                    await ask(path, data=raw)
            for path in ("chat/completions", "completions"):
                await ask(path, json=VALID[path])
        return 1.0

    task = made_task(tokenizer, play=requests)
    (rollout,), _ = play(environments, tokenizer, [task], lambda _: "hi<|im_end|>", timeout=800.0)
    ok(rollout)
    printed = capfd.readouterr().err
    wrong = [
        a
        for a in answers
        if a[0] not in (200, 400) or a[1] not in ("application/json", "text/event-stream")
    ]
    refused = sum(status == 400 for status, _, _ in answers)
    with capfd.disabled():
        print(f"{len(answers)} requests, {refused} refused, {len(wrong)} wrong")
    assert not wrong, wrong[0]
    assert [status for status, _, _ in answers[-2:]] == [200, 200]
    assert "Traceback" not in printed
