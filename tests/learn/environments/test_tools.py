"""Tools: calls found in what models write, run, answered; bad ones told to the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tests.support.tool_calls import call, said
from tunesmith.errors import ConfigError
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.data.chat_checks import check_chatml
from tunesmith.learn.environments.tools import (
    BadCall,
    Parse,
    ToolCall,
    parse_hermes,
    parse_llama,
    parse_mistral,
    parser_for,
)
from tunesmith.types import Status

ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("parse", "raw", "content", "calls"),
    [
        (
            parse_hermes,
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            "",
            [ADD],
        ),
        (
            parse_hermes,
            'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}',
            "Let me see.",
            [ADD],
        ),
        (parse_hermes, '<tool_call>{"name": "now"}</tool_call>' * 2, "", [ToolCall("now")] * 2),
        (
            parse_hermes,
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
            "",
            [ADD],
        ),
        (
            parse_hermes,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
            "</parameter>\n</function>\n"
            "</tool_call>",
            "",
            [ADD],
        ),
        (
            parse_hermes,
            (
                '<think>or <tool_call>{"name": "no"}</tool_call>?</think>So <tool_call>{"name": '
                '"yes"}</tool_call>'
            ),
            '<think>or <tool_call>{"name": "no"}</tool_call>?</think>So',
            [ToolCall("yes")],
        ),
        (parse_hermes, 'a brace { and "name"', 'a brace { and "name"', []),
        (parse_llama, '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        (
            parse_llama,
            '{"type": "function", "function": {"name": "add", "parameters": {"a": 1, "b": 2}}}',
            "",
            [ADD],
        ),
        (
            parse_llama,
            '<|python_tag|>{"name": "now"}; {"name": "now", "parameters": {}}',
            "",
            [ToolCall("now")] * 2,
        ),
        (parse_llama, 'The object {"name": 1} is JSON.', 'The object {"name": 1} is JSON.', []),
        (parse_mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
        (parse_mistral, "no call", "no call", []),
    ],
)
def test_calls_are_found(parse: Parse, raw: str, content: str, calls: list[Any]) -> None:
    text = raw.replace("<|python_tag|>", "").replace(
        "[TOOL_CALLS]", "" if parse is parse_mistral else "[TOOL_CALLS]"
    )
    assert parse(raw, text) == (content if calls else text, calls)


@pytest.mark.parametrize(
    ("parse", "raw", "reason"),
    [
        (
            parse_hermes,
            '<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>',
            "not valid JSON",
        ),
        (parse_hermes, "<tool_call>add(1, 2)</tool_call>", "not valid JSON"),
        (parse_hermes, '<tool_call>["add"]</tool_call>', "a tool call is an object"),
        (parse_hermes, '<tool_call>{"tool": "add"}</tool_call>', "names no tool"),
        (parse_hermes, '<tool_call>{"name": 7}</tool_call>', "names no tool"),
        (
            parse_hermes,
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            "'add' are not a JSON object",
        ),
        (parse_hermes, "<tool_call>", "not valid JSON"),
        (parse_hermes, "<tool_call>" + "[" * 100_000, "not valid JSON"),
        (parse_llama, '{"name": "add", "parameters": ' + "[" * 100_000, "not valid JSON"),
        (parse_mistral, "[TOOL_CALLS]" + "[" * 100_000, "not valid JSON"),
        (parse_llama, '{"name": "add", "parameters": {', "not valid JSON"),
        (parse_llama, "<|python_tag|>add.call(1)", "not valid JSON"),
        (parse_mistral, "[TOOL_CALLS]add{}", "not valid JSON"),
    ],
)
def test_calls_that_cannot_be_read_are_told(parse: Parse, raw: str, reason: str) -> None:
    _, calls = parse(raw, raw.replace("<|python_tag|>", "").replace("[TOOL_CALLS]", ""))
    (call,) = calls
    assert isinstance(call, BadCall) and reason in call.reason


def test_the_template_says_how_calls_are_written() -> None:
    assert parser_for(template("qwen2")) is parse_hermes
    assert parser_for("... <|python_tag|> ...") is parse_llama
    assert parser_for("... [TOOL_CALLS] ...") is parse_mistral
    assert parser_for("plain") is parse_hermes


TOOLS = '''
import threading
from typing import Any

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def divide(a: float, b: float) -> dict[str, float]:
    """Divide a number by another.

    Args:
        a: What is divided.
        b: What it is divided by.
    """
    return {"quotient": a / b}

def hang() -> str:
    """Never return."""
    threading.Event().wait()

def pairs() -> dict:
    """Give what no JSON holds."""
    return {(1, 2): 3}

def undescribed(a: int) -> int:
    """No word on the argument."""

def untyped(a):
    """Something.

    Args:
        a: A thing.
    """
'''
ALL = ("env.py:add", "env.py:divide", "env.py:hang", "env.py:pairs")


def test_tools_are_described_called_and_answered(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, TOOLS, tools=ALL)
    policy = said(
        [call("add", a=3, b=4), "So. " + call("divide", a=1, b=4) + call("add", a=1, b=1)]
    )
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], policy)
    check_tokens(ok(rollout), engine)
    assert rollout.reward is None, "reward functions judge"
    assert rollout.metrics == {
        "turns": 3.0,
        "forks": 0.0,
        "unfinished": 0.0,
        "tool_calls": 3.0,
        "bad_calls": 0.0,
    }
    assert len([record for record in rollout.records if record.turns]) == 1
    assert rollout.messages is not None
    assert [m["role"] for m in rollout.messages] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == [
        "7",
        '{"quotient": 0.25}',
        "2",
    ]
    first = rollout.messages[0]["tool_calls"][0]
    assert first["function"] == {"name": "add", "arguments": '{"a": 3, "b": 4}'}
    assert rollout.messages[1]["tool_call_id"] == first["id"]
    prompt = tokenizer.decode(rollout.token_ids[: rollout.turns[0].start])
    assert "Add two numbers." in prompt and '"name": "divide"' in prompt


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ("<tool_call>{nonsense</tool_call>", "Error: the tool call is not valid JSON"),
        (call("ad", a=1, b=2), "Error: there is no tool 'ad'. Did you mean 'add'?"),
        (
            call("add", a=1),
            "Error: wrong arguments for add(a, b): missing a required argument: 'b'",
        ),
        (
            call("add", a=1, b=2, c=3),
            "Error: wrong arguments for add(a, b): got an unexpected keyword argument 'c'",
        ),
        (call("divide", a=1, b=0), "Error: ZeroDivisionError: "),
        (call("add", a=1, b=None), "Error: TypeError: "),
        (call("pairs"), "Error: TypeError: keys must be str"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_policy(
    turn: str, words: str, tokenizer: Any, tmp_path: Path
) -> None:
    environments = load(tmp_path, TOOLS, tools=ALL)
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], said([turn]))
    check_tokens(ok(rollout), engine)
    assert rollout.messages is not None and rollout.messages[1]["role"] == "tool"
    assert rollout.messages[1]["content"].startswith(words), rollout.messages[1]
    assert rollout.messages[2]["content"].startswith(words)
    assert len(rollout.records) == 1 and rollout.metrics["turns"] == 2.0


def test_a_bad_call_may_end_the_episode(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, TOOLS, tools=ALL, bad_call="end")
    policy = said(["<tool_call>{nonsense</tool_call>"])
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], policy)
    assert ok(rollout).metrics["turns"] == 1.0 and rollout.metrics["bad_calls"] == 1.0


def test_a_tool_that_hangs_fails_its_rollout(tokenizer: Any, tmp_path: Path) -> None:
    environments = load(tmp_path, TOOLS, tools=ALL, timeout=0.5)
    (rollout,), _ = play(environments, tokenizer, [made_task(tokenizer)], said([call("hang")]))
    assert rollout.status is Status.TIMED_OUT and "the tool 'hang' did not return" in str(
        rollout.error
    )


def test_an_environment_may_have_tools_beside_its_steps(tokenizer: Any, tmp_path: Path) -> None:
    code = (
        TOOLS
        + """
class Quiz:
    def reset(self, answer, **columns):
        self.answer = answer

    def step(self, action):
        return None, float(action == self.answer), True
"""
    )
    environments = load(tmp_path, code, path="env.py:Quiz", tools=ALL[:1])
    task = made_task(tokenizer, answer="7")
    (rollout,), engine = play(environments, tokenizer, [task], said([call("add", a=3, b=4)]))
    check_tokens(ok(rollout), engine)
    assert rollout.reward == 1.0 and rollout.metrics["turns"] == 2.0
    never = said([call("add", a=1, b=1)] * 20)
    (rollout,), _ = play(environments, tokenizer, [task], never)
    assert ok(rollout).reward == 0.0 and rollout.metrics["unfinished"] == 1.0


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"tools": ("env.py:undescribed",)}, "'env.py:undescribed' cannot be a tool: "),
        ({"tools": ("env.py:untyped",)}, "'env.py:untyped' cannot be a tool: "),
        ({"tools": ("env.py:ad",)}, "has no function 'ad'. Did you mean 'add'?"),
        ({"tools": ("env.py:add", "env.py:add")}, "two tools called 'add'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(
    section: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, TOOLS, **section)
    assert words in str(raised.value)


def test_a_template_without_a_place_for_tools_is_refused(tmp_path: Path) -> None:
    plain = byte_level(template("chatml"))
    environments = load(tmp_path, TOOLS, tools=ALL)
    with pytest.raises(ConfigError, match="the chat template does not take tools"):
        play(environments, plain, [made_task(plain)], said([]))


def named_templates(path: Path) -> Any:
    """A ChatML tokenizer as checkpoints save it whose tools have a template of their own."""
    tokenizer = byte_level(None)
    tokenizer.chat_template = {"default": template("chatml"), "tool_use": template("qwen2")}
    tokenizer.save_pretrained(path)
    assert (path / "additional_chat_templates" / "tool_use.jinja").is_file()
    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("kind", ["hermes", "tool_use"])
def test_templates_with_a_place_for_tools_play_episodes(kind: str, tmp_path: Path) -> None:
    tokenizer = (
        byte_level(template("hermes")) if kind == "hermes" else named_templates(tmp_path / "model")
    )
    environments = load(tmp_path, TOOLS, tools=ALL)
    policy = said(
        [call("add", a=3, b=4), "So. " + call("divide", a=1, b=4) + call("add", a=1, b=1)]
    )
    (rollout,), engine = play(environments, tokenizer, [made_task(tokenizer)], policy)
    check_tokens(ok(rollout), engine)
    assert rollout.metrics["bad_calls"] == 0 and rollout.metrics["forks"] == 0
    answers = [m["content"] for m in rollout.messages or () if m["role"] == "tool"]
    assert answers == ["7", '{"quotient": 0.25}', "2"]


def test_text_stays_text_in_a_notation_without_types() -> None:
    call = (
        "<tool_call>\n<function=find>\n<parameter=year>\n2024\n</parameter>\n"
        "<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    kinds = {"year": {"type": "string"}, "limit": {"type": "integer"}, "odd": True}
    schema = {"type": "function", "function": {"name": "find", "parameters": {"properties": kinds}}}
    bare: dict[str, Any] = {"name": "find"}
    (found,) = parse_hermes(call, call, [bare, schema])[1]
    assert found == ToolCall("find", {"year": "2024", "limit": 5})
    assert parse_hermes(call, call, [bare])[1] == [ToolCall("find", {"year": 2024, "limit": 5})]


def test_what_the_hermes_template_writes_is_what_its_parser_reads() -> None:
    written = {"name": ADD.name, "arguments": ADD.arguments}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": "So.",
            "tool_calls": [{"type": "function", "function": written}] * 2,
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    chat = ChatTemplate.of(byte_level(template("hermes")))
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    rendered = chat.learned(messages, [schema])
    (text,) = {one.text for one in rendered}
    turns = [text[a:b] for one in rendered for a, b in one.spans]
    assert parse_hermes(turns[0], turns[0])[1] == [ADD] * 2
    assert turns[1] == "3<|im_end|>"
    assert (
        text.count("<|im_start|>system") == 1 and "Be brief." in text and json.dumps(schema) in text
    )
    alone = chat.render(messages[1:2], prompt=True)
    assert alone == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"


def test_the_hermes_template_is_refused_where_its_tokens_are_missing() -> None:
    check_chatml(byte_level())
    with pytest.raises(ConfigError, match=r"<\|im_start\|>.*<\|im_end\|>"):
        check_chatml(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))
