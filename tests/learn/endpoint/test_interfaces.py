"""What the three interfaces answer: ``chat.completions``, ``completions`` and ``responses``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tunesmith.errors import EpisodeError
from tunesmith.learn.endpoint.responses import messages_of
from tunesmith.learn.environments.conversation import before_stop
from tunesmith.types import Status

HEAD = """
import asyncio
START = [{"role": "user", "content": "Go."}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]

async def agent(client, **columns):
    ask = client.chat.completions.create
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'


def played(tokenizer: Any, folder: Path, body: str, policy: Any, **options: Any) -> Any:
    code = HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines())
    environments = load(folder, code, path="env.py:agent", max_turns=20)
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], policy, **options)
    if rollout.status is Status.OK:
        check_tokens(rollout, engine)
    return rollout


def says(text: str) -> Any:
    return lambda _: text


def test_a_request_for_several_answers_forks(tokenizer: Any, tmp_path: Path) -> None:
    body = """
reply = await ask(messages=START, n=3)
assert [c.index for c in reply.choices] == [0, 1, 2]
assert reply.usage.completion_tokens == 3 * (reply.usage.completion_tokens // 3)
return float(sum(c.message.content == "hi" for c in reply.choices))
"""
    rollout = ok(played(tokenizer, tmp_path, body, says("hi<|im_end|>")))
    assert rollout.reward == 3.0 and [len(r.turns) for r in rollout.records] == [1, 1, 1]


def test_logprobs_are_those_of_the_sampled_tokens(tokenizer: Any, tmp_path: Path) -> None:
    body = """
reply = await ask(messages=START, logprobs=True, top_logprobs=5)
content = reply.choices[0].logprobs.content
assert all(e.top_logprobs[0].logprob == e.logprob and bytes(e.bytes).decode() == e.token for e in content)
text = await client.completions.create(prompt="x", logprobs=0)
found = text.choices[0].logprobs
assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == text.usage.completion_tokens
return sum(e.logprob for e in content)
"""
    rollout = ok(played(tokenizer, tmp_path, body, says("hello<|im_end|>")))
    record = next(r for r in rollout.records if "Go." in tokenizer.decode(r.token_ids))
    recorded = [p for p, sampled in zip(record.logprobs, record.sampled, strict=True) if sampled]
    assert rollout.reward == pytest.approx(sum(recorded))


def test_a_stop_string_is_trained_and_not_returned(tokenizer: Any, tmp_path: Path) -> None:
    body = """
reply = await ask(messages=START, stop=["Observation:", "zzz"])
assert reply.choices[0].message.content == "Action: look\\n", reply
assert reply.choices[0].finish_reason == "stop"
await ask(messages=[*START, reply.choices[0].message, {"role": "user", "content": "a wall"}])
return 1.0
"""
    rollout = ok(
        played(
            tokenizer, tmp_path, body, says("Action: look\nObservation: I made this up<|im_end|>")
        )
    )
    (record,) = rollout.records
    first = record.token_ids[record.turns[0].start : record.turns[0].stop]
    assert "Observation:" in tokenizer.decode(first) and record.sampled[record.turns[0].stop - 1]


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("a b c", ("c", "b"), "a "),
        ("abc", ("x",), "abc"),
        ("abc", (), "abc"),
        ("abcb", ("b",), "a"),
        ("b", ("b",), ""),
    ],
)
def test_before_stop(text: str, stop: tuple[str, ...], kept: str) -> None:
    assert before_stop(text, stop) == kept


def test_no_call_is_found_where_none_may_be_made(tokenizer: Any, tmp_path: Path) -> None:
    body = """
reply = await ask(messages=START, tools=TOOLS, tool_choice="none")
assert reply.choices[0].message.tool_calls is None and "<tool_call>" in reply.choices[0].message.content
named = {"type": "function", "function": {"name": "add"}}
reply = await ask(messages=START, tools=TOOLS, tool_choice=named, response_format={"type": "json_object"})
return float(reply.choices[0].message.tool_calls[0].function.name == "add")
"""
    rollout = ok(played(tokenizer, tmp_path, body, says(CALL)))
    assert rollout.reward == 1.0
    assert set(rollout.notes["not_enforced"]) == {"tool_choice", "response_format"}


def test_raw_text_goes_on_in_the_same_record(tokenizer: Any, tmp_path: Path) -> None:
    body = """
create = client.completions.create
one = (await create(prompt="Once", max_tokens=50)).choices[0].text
assert one == " upon"
two = await create(prompt="Once" + one + " a time", echo=True)
assert two.choices[0].text == "Once upon a time upon"
ids = await create(prompt=[300, 301])
assert ids.usage.prompt_tokens == 2
return 1.0
"""
    rollout = ok(played(tokenizer, tmp_path, body, says(" upon<|im_end|>")))
    texts = [tokenizer.decode(r.token_ids) for r in rollout.records]
    assert any(t == "Once upon a time upon<|im_end|>" for t in texts), texts
    fork = next(
        r for r, t in zip(rollout.records, texts, strict=True) if t.startswith("Once upon a")
    )
    assert not any(fork.sampled[: fork.turns[0].start]), "the first answer is context in the fork"


def test_several_prompts_are_answered_in_their_order(tokenizer: Any, tmp_path: Path) -> None:
    body = """
create = client.completions.create
prompts = ["One", "Two", [300, 301]]
many = await create(prompt=prompts, n=2, echo=True, logprobs=0)
assert [c.index for c in many.choices] == list(range(6))
assert [c.text for c in many.choices] == ["One!"] * 2 + ["Two!"] * 2 + ["!"] * 2, many
alone = [await create(prompt=prompt) for prompt in prompts]
assert many.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
assert [c.logprobs.text_offset[0] for c in many.choices] == [3, 3, 3, 3, 0, 0]
return 1.0
"""
    rollout = ok(played(tokenizer, tmp_path, body, says("!<|im_end|>")))
    assert sum(len(record.turns) for record in rollout.records) == 9


def test_the_rendered_prompt_as_raw_text_is_the_tasks_own_record(
    tokenizer: Any, tmp_path: Path
) -> None:
    body = """
text = columns["rendered"]
await client.completions.create(prompt=text)
return 1.0
"""
    code = HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines())
    environments = load(tmp_path, code, path="env.py:agent")
    task = made_task(tokenizer)
    task = made_task(tokenizer, rendered=tokenizer.decode(task.prompt_ids))
    (rollout,), engine = play(environments, tokenizer, [task], says("yes<|im_end|>"))
    check_tokens(ok(rollout), engine)
    assert len(rollout.records) == 1 and rollout.token_ids[: len(task.prompt_ids)] == list(
        task.prompt_ids
    )


def test_responses_with_tools_are_one_growing_conversation(tokenizer: Any, tmp_path: Path) -> None:
    body = """
create = client.responses.create
tool = {"type": "function", "strict": True, **TOOLS[0]["function"]}
first = await create(input=START, tools=[tool], max_output_tokens=100)
(call,) = [item for item in first.output if item.type == "function_call"]
output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
second = await create(input=[*START, *first.output, output], tools=[tool])
assert second.output_text == "It is 3." and second.status == "completed"
third = await create(input="Sure?", previous_response_id=second.id, tools=[tool])
assert third.usage.total_tokens > second.usage.total_tokens
return 1.0
"""

    def policy(text: str) -> str:
        return "It is 3.<|im_end|>" if "tool_response" in text else f"Adding.{CALL}"

    rollout = ok(played(tokenizer, tmp_path, body, policy))
    assert [len(record.turns) for record in rollout.records] == [3], "nothing forks"
    assert [m["role"] for m in rollout.messages] == [
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]


def test_instructions_are_not_carried_on(tokenizer: Any, tmp_path: Path) -> None:
    body = """
first = await client.responses.create(input="a", instructions="Be brief.", include=["message.output_text.logprobs"])
assert first.output[0].content[0].logprobs
second = await client.responses.create(input="b", previous_response_id=first.id)
return 1.0
"""
    seen: list[str] = []

    def policy(text: str) -> str:
        seen.append(text)
        return "ok<|im_end|>"

    ok(played(tokenizer, tmp_path, body, policy))
    assert "Be brief." in seen[0] and "Be brief." not in seen[1] and "ok" in seen[1]


def test_only_the_newest_responses_are_kept(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.learn.endpoint.responses.KEPT", 2)
    body = """
made = [await client.responses.create(input=str(n), store=None if n else False) for n in range(4)]
for n in (0, 1):
    try:
        await client.responses.create(input="on", previous_response_id=made[n].id)
    except Exception as error:
        assert "previous_response_id" in str(error)
    else:
        raise AssertionError(n)
for n in (2, 3):
    await client.responses.create(input="on", previous_response_id=made[3].id)
return 1.0
"""
    assert ok(played(tokenizer, tmp_path, body, says("ok<|im_end|>"))).reward == 1.0


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        ("messages=START, n=0", "'n'"),
        ("messages=START, n=True", "'n'"),
        ("messages=START, stop=['']", "'stop.0'"),
        ("messages=START, tools=['add']", "'tools.0'"),
        ("messages=START, tools=[{'type': 'function', 'function': {}}]", "'tools.0'"),
        ("messages=START, audio={'voice': 'x'}", "'audio'"),
        ("messages=START, functions=[{}]", "'functions'"),
        (
            "messages=START, extra_body={'structured_outputs': {'regex': 'a'}}",
            "'structured_outputs'",
        ),
        ("messages=START, extra_body={'continue_final_message': True}", "'continue_final_message'"),
        ("messages=[{'role': 'user', 'content': chr(0xD800)}]", "Unicode"),
        ("messages=[{'role': 'user', 'content': [{'type': 'image_url'}]}]", "image 1"),
    ],
)
def test_what_chat_refuses(request_: str, key: str, tokenizer: Any, tmp_path: Path) -> None:
    rollout = played(tokenizer, tmp_path, f"await ask({request_})", says("x<|im_end|>"))
    assert rollout.status is Status.ENVIRONMENT_FAILED and key in str(rollout.error)


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ("completions.create(prompt='')", "'prompt'"),
        ("completions.create(prompt=['a', ''])", "'prompt'"),
        ("completions.create(prompt=[[300], [-1]])", "'prompt'"),
        ("completions.create(prompt=['a'] * 1025)", "1025 prompts"),
        ("completions.create(prompt='a', suffix='b')", "'suffix'"),
        ("completions.create(prompt='a', max_tokens=0)", "'max_tokens'"),
        ("completions.create(prompt='a', max_tokens=0, echo=True)", "scores no prompts"),
        ("completions.create(prompt='a', max_tokens=-1)", "'max_"),
        ("responses.create(input=3)", "'input'"),
        ("responses.create(input='a', background=True)", "'background'"),
        ("responses.create(input='a', conversation='conv_1')", "'conversation'"),
        ("responses.create(input='a', prompt={'id': 'p_1'})", "'prompt'"),
        ("messages.create(messages=START, mcp_servers=[{'url': 'x'}])", "'mcp_servers'"),
        ("responses.create(input='a', previous_response_id='resp_9')", "resp_9"),
        ("responses.create(input=[{'type': 'item_reference'}])", "item_reference"),
        ("responses.create(input='a', tools=[{'type': 'function'}])", "'name'"),
        (
            "responses.create(input='a', tools=[{'type': 'web_search'}], "
            "tool_choice={'type': 'web_search'})",
            "'tool_choice'",
        ),
    ],
)
def test_what_the_others_refuse(call: str, key: str, tokenizer: Any, tmp_path: Path) -> None:
    rollout = played(tokenizer, tmp_path, f"await client.{call}", says("x<|im_end|>"))
    assert rollout.status is Status.ENVIRONMENT_FAILED and key in str(rollout.error)


def test_tools_of_a_provider_are_left_out_and_namespaces_are_opened(
    tokenizer: Any, tmp_path: Path
) -> None:
    """As Codex and Claude Code list them."""
    body = """
add = {"type": "function", "name": "add", "parameters": {}}
tools = [{"type": "web_search"}, {"type": "namespace", "name": "sums", "tools": [add]}]
answer = await client.responses.create(input="Go.", tools=tools)
(call,) = answer.output
assert (call.name, call.namespace) == ("add", "sums")
said = [{"type": "message", "role": "user", "content": "Go."}, call]
said += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
await client.responses.create(input=said, tools=tools)
search = {"type": "web_search"}
chat = [search, {"type": "function", "function": {"name": "add", "parameters": {}}}]
answer = await ask(messages=START, tools=chat)
assert answer.choices[0].message.tool_calls[0].function.name == "add"
search = {"type": "web_search_20250305", "name": "web_search"}
tools = [search, {"name": "add", "input_schema": {}}]
answer = await client.messages.create(messages=START, tools=tools)
return float(answer.content[0].name == "add")
"""
    seen: list[str] = []

    def policy(text: str) -> str:
        seen.append(text)
        return CALL + "<|im_end|>"

    rollout = ok(played(tokenizer, tmp_path, body, policy))
    assert rollout.reward == 1.0 and not any("web_search" in text for text in seen)
    assert rollout.notes["not_enforced"] == {"unoffered_tools": ["web_search_20250305"]}
    assert [len(record.turns) for record in rollout.records if record.turns] == [2, 1, 1], (
        "one grew"
    )


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "so"}],
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    roles = [
        (m["role"], len(m.get("tool_calls", ())))
        for m in messages_of([said, call, call, result, call, result])
    ]
    assert roles == [("assistant", 2), ("tool", 0), ("assistant", 1), ("tool", 0)]
    assert messages_of([{"type": "reasoning", "summary": []}]) == []
    with pytest.raises(EpisodeError, match="computer_call"):
        messages_of([{"type": "computer_call"}])


def test_variables_of_the_chat_template_are_set_by_request(tmp_path: Path) -> None:
    body = """
short = await ask(messages=START, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
said = [*START, short.choices[0].message, {"role": "user", "content": "More."}]
await ask(messages=said, chat_template_kwargs={"enable_thinking": False})
await ask(messages=START)
return 1.0
"""
    seen: list[str] = []

    def policy(text: str) -> str:
        seen.append(text)
        return "ok<|im_end|>"

    rollout = ok(played(byte_level(template("qwen3")), tmp_path, body, policy))
    assert [text.endswith("<think>\n\n</think>\n\n") for text in seen] == [True, True, False]
    assert rollout.status is Status.OK


def test_a_variable_that_the_template_does_not_read_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    body = "await ask(messages=START, chat_template_kwargs={'enable_thinking': False})"
    rollout = played(tokenizer, tmp_path, body, says("x<|im_end|>"))
    assert rollout.status is Status.ENVIRONMENT_FAILED and "enable_thinking" in str(rollout.error)
