"""Anthropic's ``messages``, and what a reply has to be: calls of tools, JSON of a schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.episodes import check_tokens, load, made_task, ok, play
from tunesmith.learn.endpoint import checks
from tunesmith.learn.endpoint.asks import Ask, BadRequest, ChatRequest, parse
from tunesmith.learn.endpoint.checks import check_schema, problems_of
from tunesmith.learn.endpoint.schema_program import unlike
from tunesmith.learn.environments.conversation import Reply
from tunesmith.learn.environments.tools import ToolCall
from tunesmith.types import Completion, Status

HEAD = """
GO = [{"role": "user", "content": "Go."}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}

async def agent(client, **columns):
    async def ask(**request):
        return await client.messages.create(**{"max_tokens": 300, "model": "m", **request})
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def played(tokenizer: Any, folder: Path, body: str, policy: Any) -> Any:
    code = HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines())
    environments = load(folder, code, path="env.py:agent")
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], policy)
    if rollout.status is Status.OK:
        check_tokens(rollout, engine)
    return rollout


def test_calls_and_their_results_are_one_growing_conversation(
    tokenizer: Any, tmp_path: Path
) -> None:
    body = """
said = list(GO)
first = await ask(messages=said, tools=[TOOL], system=[{"type": "text", "text": "Be brief."}])
assert first.stop_reason == "tool_use" and [b.type for b in first.content] == ["text", "tool_use", "tool_use"]
results = [{"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "3"}]}
    for b in first.content[1:]]
said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
second = await ask(messages=said, tools=[TOOL], system="Be brief.")
assert second.stop_reason == "end_turn" and second.content[0].text == "It is 3."
assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
return float(first.content[1].input.a + first.content[1].input.b)
"""
    seen: list[str] = []

    def policy(text: str) -> str:
        seen.append(text)
        spoken = "It is 3." if "tool_response" in text else f"Adding. {CALL}\n{CALL}"
        return f"{spoken}<|im_end|>"

    rollout = ok(played(tokenizer, tmp_path, body, policy))
    assert rollout.reward == 3.0 and "Be brief." in seen[0]
    assert [len(record.turns) for record in rollout.records if record.turns] == [2], "no fork"


def test_why_a_turn_ended(tokenizer: Any, tmp_path: Path) -> None:
    body = """
cut = await ask(messages=GO, max_tokens=2)
assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
stopped = await ask(messages=GO, stop_sequences=["zz", " two"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " two")
return float(stopped.content[0].text == "one")
"""
    assert ok(played(tokenizer, tmp_path, body, lambda _: "one two<|im_end|>")).reward == 1.0


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        ("messages=[]", "'messages'"),
        ("messages=GO, max_tokens=0", "'max_tokens'"),
        ("messages=[{'role': 'tool', 'content': 'x'}]", "'role'"),
        ("messages=[{'role': 'user', 'content': [{'type': 'image'}]}]", "image 1"),
        ("messages=GO, tools=[{'type': 'custom', 'name': 'w'}]", "input_schema"),
        ("messages=GO, tools=[TOOL], tool_choice={'type': 'tool', 'name': 'ad'}", "'add'"),
        ("messages=GO, tool_choice={'type': 'any'}", "'tool_choice'"),
        ("messages=GO, tool_choice={'type': 'most'}", "'tool_choice.type'"),
    ],
)
def test_what_messages_refuse(request_: str, key: str, tokenizer: Any, tmp_path: Path) -> None:
    rollout = played(tokenizer, tmp_path, f"await ask({request_})", lambda _: "x<|im_end|>")
    assert rollout.status is Status.ENVIRONMENT_FAILED and key in str(rollout.error)


def test_an_answer_says_what_it_is_not(tokenizer: Any, tmp_path: Path) -> None:
    body = """
schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
other = await client.chat.completions.create(messages=GO, response_format=form)
assert [(p.index, p.parameter) for p in other.unmet] == [(0, "response_format")]
form = {"type": "json_schema", "name": "n", "schema": schema}
other = await client.responses.create(input="Go.", text={"format": form})
assert other.unmet[0].parameter == "response_format"
free = await ask(messages=GO, tools=[TOOL], tool_choice={"type": "any"})
assert free.unmet[0].parameter == "tool_choice"
plain = await client.chat.completions.create(messages=GO)
return float("unmet" not in plain)
"""
    rollout = ok(played(tokenizer, tmp_path, body, lambda _: "no<|im_end|>"))
    assert rollout.reward == 1.0 and rollout.metrics["unmet"] == 3.0
    assert set(rollout.notes["not_enforced"]) == {"response_format", "tool_choice"}


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"n": 1}', ""),
        ('{"n": "1"}', "$.n"),
        ("{}", "'n' is a required property"),
        ("n = 1", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_unlike_a_schema(text: str, why: str) -> None:
    pytest.importorskip("jsonschema")
    assert why in unlike(SCHEMA, text) and bool(unlike(SCHEMA, text)) == bool(why)
    assert bool(unlike({"type": "object"}, text)) == (why == "not JSON")


def test_no_reference_of_a_schema_is_fetched() -> None:
    pytest.importorskip("jsonschema")
    assert "not checked" in unlike({"$ref": "http://127.0.0.1:9/x.json"}, "1")
    with pytest.raises(BadRequest, match="no JSON schema"):
        check_schema({"type": "number of things"})


def nested() -> dict[str, Any]:
    """Two alternatives that are itself: an error at depth n is found 2^n times."""
    again: Any = {"items": {"$ref": "#/$defs/a"}, "type": "array"}
    return {"$defs": {"a": {"anyOf": [again, again]}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": "(a+)+$"}, json.dumps("a" * 40 + "!")),
        (nested(), "[" * 40 + "1" + "]" * 40),
    ],
)
async def test_a_schema_without_end_holds_nobody_up(
    schema: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonschema")
    monkeypatch.setattr(checks._pool, "_deadline", 0.3)
    done = Completion([1], [0.0], [0], "stop")
    reply = Reply({"content": text}, text, [], 1, done)
    (problem,) = await problems_of(Ask(schema=schema), [reply])
    assert problem.parameter == "response_format" and "not checked" in problem.reason


@pytest.mark.parametrize(
    ("ask", "called", "problems"),
    [
        (Ask(must_call=""), ["f"], []),
        (Ask(must_call=""), [], ["tool_choice"]),
        (Ask(must_call="g"), ["f"], ["tool_choice"]),
        (Ask(must_call="g"), ["f", "g"], []),
        (Ask(parallel=False), ["f", "f"], ["parallel_tool_calls"]),
        (Ask(parallel=False), ["f"], []),
        (Ask(schema=SCHEMA), ["f"], []),
    ],
)
async def test_problems_of_calls(ask: Ask, called: list[str], problems: list[str]) -> None:
    done = Completion([1], [0.0], [0], "stop")
    reply = Reply({"content": ""}, "", [ToolCall(name) for name in called], 1, done)
    assert [problem.parameter for problem in await problems_of(ask, [reply])] == problems


@pytest.mark.parametrize(
    ("choice", "must", "may"),
    [
        ("auto", None, True),
        ("none", None, False),
        ("required", "", True),
        ({"type": "function", "function": {"name": "f"}}, "f", True),
        ({"type": "function", "name": "f"}, "f", True),
    ],
)
def test_the_spellings_of_tool_choice(choice: Any, must: str | None, may: bool) -> None:
    request = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": choice,
    }
    ask = parse(ChatRequest, request).as_ask(request)
    assert (ask.must_call, ask.may_call) == (must, may)
