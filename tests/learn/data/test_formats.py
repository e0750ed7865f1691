"""Formats are found from the columns; what cannot be used names what was found and what is
needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tunesmith.learn.data.formats import Example, Goal, convert, detect
from tunesmith.learn.data.sources import BadLine, SourceRow
from tunesmith.learn.data.values import read_messages

USER = {"role": "user", "content": "1+1?"}
ASSISTANT = {"role": "assistant", "content": "2"}


def made(columns: dict[str, Any], goal: Goal, **names: str) -> Example:
    row = SourceRow("a.jsonl", "a.jsonl:7", columns)
    return convert(row, detect(row, goal, **names), goal)


def as_texts(columns: dict[str, Any]) -> dict[str, Any]:
    """As they are read of a CSV file that a table was saved to."""
    return {k: v if isinstance(v, list | str) else str(v) for k, v in columns.items()}


@pytest.mark.parametrize("name", ["prompt", "question", "instruction", "query", "problem", "input"])
def test_prompts_for_rl(name: str) -> None:
    example = made({name: "1+1?", "answer": "2", "level": 3}, "rl")
    assert example.prompt == "1+1?" and example.completion is None and example.id == "a.jsonl:7"
    passed_on = {"answer": "2", "level": 3} | ({} if name == "prompt" else {name: "1+1?"})
    assert example.columns == passed_on


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("prompt", "completion"),
        ("question", "answer"),
        ("instruction", "output"),
        ("input", "target"),
    ],
)
def test_prompt_completion_for_sft(prompt: str, completion: str) -> None:
    example = made({prompt: "1+1?", completion: "2"}, "sft")
    assert (example.prompt, example.completion) == ("1+1?", "2")


def test_alpaca() -> None:
    full = {"instruction": "Add.", "input": "1+1", "output": "2", "text": "all of it"}
    assert made(full, "sft").prompt == "Add.\n\n1+1"
    assert made({**full, "input": ""}, "sft").prompt == "Add."
    assert made({"instruction": "Add."}, "rl").prompt == "Add."


def test_text() -> None:
    assert made({"text": "once upon"}, "sft").text == "once upon"


def test_messages() -> None:
    talk = {"messages": [USER, ASSISTANT], "id": 12}
    example = made(talk, "sft")
    assert example.prompt == [] and example.completion == [USER, ASSISTANT] and example.id == "12"
    example = made(talk, "rl")
    assert example.prompt == [USER] and example.columns["messages"] == [USER, ASSISTANT]
    assert made({"messages": [USER]}, "rl").prompt == [USER]


def test_sharegpt() -> None:
    talk = [
        {"from": "system", "value": "brief"},
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2"},
    ]
    assert made({"conversations": talk}, "sft").completion == [
        {"role": "system", "content": "brief"},
        USER,
        ASSISTANT,
    ]


def test_prompts_and_completions_that_are_messages() -> None:
    example = made({"prompt": [USER], "completion": [ASSISTANT]}, "sft")
    assert example.prompt == [USER] and example.completion == [ASSISTANT]
    example = made({"prompt": "1+1?", "completion": [ASSISTANT]}, "sft")
    assert example.prompt == [USER] and example.completion == [ASSISTANT]
    assert made({"prompt": [USER], "answer": "2"}, "rl").prompt == [USER]


def test_messages_as_json_text_and_with_absent_keys_of_a_table() -> None:
    row = {
        "messages": '[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]'
    }
    assert made(row, "sft").completion == [USER, ASSISTANT]
    assert made({"messages": [{**USER, "tool_calls": None}]}, "rl").prompt == [USER]


def test_content_in_text_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    assert made({"messages": [{"role": "user", "content": parts}]}, "rl").prompt == [USER]


def test_a_ultrachat_line_is_a_conversation_for_sft_and_a_prompt_for_rl() -> None:
    row = {"prompt": "1+1?", "prompt_id": "x", "messages": [USER, ASSISTANT]}
    assert made(row, "sft").completion == [USER, ASSISTANT]
    assert made(row, "rl").prompt == "1+1?"


def test_named_columns() -> None:
    row = {"prompt": "no", "ask": "1+1?", "say": "2"}
    assert made(row, "rl", prompt="ask").prompt == "1+1?"
    assert made(row, "sft", prompt="ask", completion="say").completion == "2"
    assert made({"text": "1+1?"}, "rl", prompt="text").prompt == "1+1?"
    assert made({"messages": [USER, ASSISTANT]}, "sft", prompt="messages").completion == [
        USER,
        ASSISTANT,
    ]


def test_tools_are_read_and_passed_on() -> None:
    row = {"messages": [USER], "tools": '[{"type": "function"}]'}
    example = made(row, "rl")
    assert example.tools == [{"type": "function"}] and example.columns["tools"] == row["tools"]


@pytest.mark.parametrize(
    ("columns", "goal", "names", "reason"),
    [
        (
            {"a": 1, "b": 2},
            "rl",
            {},
            "no prompt; found columns: a, b; needs one of prompt, question",
        ),
        ({"text": "x"}, "rl", {}, "or set data.prompt"),
        ({"question": "x"}, "sft", {}, "no completion; found columns: question"),
        ({"answer": "x"}, "sft", {}, "no prompt; found columns: answer"),
        (
            {"qestion": "x"},
            "rl",
            {"prompt": "question"},
            "no column 'question'.*Did you mean 'qestion'",
        ),
        (
            {"question": "x", "problem": "y"},
            "rl",
            {},
            "question, problem could each be meant.*data.prompt",
        ),
        (
            {"problem": "x", "solution": "y", "answer": "z"},
            "sft",
            {},
            "answer, solution could.*data.completion",
        ),
        ({"prompt": None}, "rl", {}, "'prompt' is null"),
        ({"prompt": True}, "rl", {}, r"'prompt' is bool \(True\), needs text"),
        ({"prompt": ""}, "rl", {}, "'prompt' is empty"),
        ({"prompt": "x\ud800"}, "rl", {}, "surrogate pair at character 1"),
        ({"prompt": []}, "rl", {}, "'prompt' is empty"),
        ({"prompt": [USER, ASSISTANT]}, "rl", {}, "ends with an assistant turn"),
        ({"messages": [ASSISTANT]}, "rl", {}, "nothing before the assistant's turn"),
        ({"messages": "hello"}, "sft", {}, "'messages' is text but not JSON"),
        ({"messages": "[" * 200_000}, "sft", {}, "it is nested too deeply"),
        ({"messages": [USER, 3]}, "sft", {}, r"messages\[1\] is int"),
        ({"messages": [{"content": "x"}]}, "sft", {}, r"messages\[0\] has no role, found: content"),
        (
            {"messages": [{"from": ["u"], "value": "x"}]},
            "sft",
            {},
            r"messages\[0\] has no role, found: from, value",
        ),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            "sft",
            {},
            "Did you mean 'assistant'",
        ),
        ({"messages": [{"role": "user"}]}, "sft", {}, "no text in 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "sft", {}, "kind"),
        ({"prompt": "x", "tools": "{"}, "rl", {}, "'tools' is text but not JSON"),
        ({"prompt": "x", "tools": "hammer, saw"}, "rl", {}, "'tools' is text but not JSON"),
        ({"prompt": "x", "tools": "{}"}, "rl", {}, "'tools' is"),
        ({"prompt": "x", "tools": [1]}, "rl", {}, "'tools' is"),
        ({"prompt": "x", "tools": 5}, "rl", {}, "'tools' is"),
    ],
)
def test_bad_lines_name_place_and_reason(
    columns: dict[str, Any], goal: Goal, names: dict[str, str], reason: str
) -> None:
    with pytest.raises(BadLine, match=f"(?s)^a.jsonl:7: .*{reason}"):
        made(columns, goal, **names)


def test_formats_describe_themselves() -> None:
    row = SourceRow("a", "a:1", {"instruction": "x", "output": "y"})
    assert detect(row, "sft").describe("sft") == (
        "prompts in 'instruction' (and 'input' where given), completions in 'output'"
    )
    talk = detect(SourceRow("a", "a:1", {"messages": []}), "rl")
    assert (
        talk.describe("rl")
        == "conversations in 'messages'; a final assistant turn is not part of the prompt"
    )


def test_arguments_of_calls_are_objects_as_in_an_episode() -> None:
    def talk(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        return [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]

    def read(arguments: Any) -> Any:
        [_, answer] = read_messages(
            SourceRow("f", "f:1", {"messages": talk(arguments)}), "messages"
        )
        return answer["tool_calls"][0]["function"]["arguments"]

    assert read('{"a": 1}') == read({"a": 1}) == {"a": 1}
    assert read('{"a": ') == '{"a": ', "what is no JSON stays as it is"


LINE = {"prompt": "1+1?", "completion": "2"}
TALK = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize("goal", ["rl", "sft", "judged"])
@pytest.mark.parametrize(
    "column",
    [
        {"video": "v.mp4"},
        {"audio": {"path": "a.wav"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_a_column_that_would_change_the_line_and_is_not_read_is_refused(
    column: dict[str, Any], goal: Goal
) -> None:
    (name,) = column
    with pytest.raises(BadLine, match=f"^a.jsonl:7: the column '{name}'"):
        made({**LINE, "label": True, **column}, goal)
    for empty in (None, [], "", {}):
        assert made({**LINE, "label": True, name: empty}, goal).prompt == "1+1?"


@pytest.mark.parametrize(
    ("columns", "goal", "name"),
    [
        ({**LINE, "weight": 0.5}, "sft", "weight"),
        ({**LINE, "sample_weight": 2}, "sft", "sample_weight"),
        ({**LINE, "label": True, "weight": 0}, "judged", "weight"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "weight": 3.0}, "pairs", "weight"),
        ({**LINE, "label": False}, "sft", "label"),
        ({**TALK, "label": False}, "sft", "label"),
        ({"text": "x", "tools": [{"type": "function"}]}, "sft", "tools"),
    ],
)
def test_weights_labels_and_tools_that_are_not_read_are_refused(
    columns: dict[str, Any], goal: Goal, name: str
) -> None:
    for written in (columns, as_texts(columns)):
        with pytest.raises(BadLine, match=f"^a.jsonl:7: the column '{name}'"):
            made(written, goal)


@pytest.mark.parametrize(
    ("columns", "goal"),
    [
        ({**LINE, "weight": 1}, "sft"), ({**LINE, "weight": 1.0, "label": True}, "sft"),
        ({"text": "x", "label": 0}, "sft"), ({"prompt": "p", "weight": 70}, "rl"),
        ({"prompt": "p", "label": False}, "rl"),
    ],
)  # fmt: skip
def test_columns_without_an_effect_on_the_line_are_left_alone(
    columns: dict[str, Any], goal: Goal
) -> None:
    made(columns, goal)
    made(as_texts(columns), goal)


def test_messages_may_be_json_text_in_any_column() -> None:
    asked, answered = json.dumps([USER]), json.dumps([ASSISTANT], indent=1)
    example = made({"prompt": asked, "completion": answered}, "sft")
    assert (example.prompt, example.completion) == ([USER], [ASSISTANT])
    other = json.dumps([{**ASSISTANT, "content": "3"}])
    example = made({"prompt": asked, "chosen": answered, "rejected": other}, "pairs")
    assert (example.prompt, example.completion) == ([USER], [ASSISTANT])
    for text in ('[{"name": "x"}]', "[1]", "[{", '[{"role": "user", "content": "x"}, 3]', "[{}]"):
        assert made({"prompt": asked, "completion": text}, "sft").completion in (
            text,
            [{"role": "assistant", "content": text}],
        )
    with pytest.raises(BadLine, match="'completion' is text but not JSON"):
        made({"prompt": asked, "completion": str([ASSISTANT])}, "sft")


PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}


def test_labels_and_margins_of_files_that_hold_text_only_are_read() -> None:
    for label in (True, False):
        assert made(as_texts({**LINE, "label": label}), "judged").desirable is label
    for margin in (0.5, 2, -1.5):
        assert made(as_texts({**PAIR, "margin": margin}), "pairs").margin == margin
    assert made({**PAIR, "margin": ""}, "pairs").margin == 0.0
    for column, goal, name in (("good", "judged", "label"), ("", "judged", "label"),
                               ("much", "pairs", "margin"), ("true", "pairs", "margin")):  # fmt: skip
        line = {**(LINE if goal == "judged" else PAIR), name: column}
        with pytest.raises(BadLine, match=f"^a.jsonl:7: '{name}'"):
            made(line, goal)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "text"), [(4, "4"), (-3, "-3"), (2.5, "2.5"), (4.0, "4.0")])
def test_a_number_is_the_text_of_it(number: float, text: str) -> None:
    assert made({"question": "2+2?", "answer": number}, "sft").completion == text
    with pytest.raises(BadLine, match="needs text"):
        made({"question": "2+2?", "answer": float("nan")}, "sft")


@pytest.mark.parametrize(
    ("call", "good"),
    [
        ({"name": "add", "arguments": {"a": 1}}, True),
        ({"id": "c", "name": "add", "arguments": '{"a": 1}'}, True),
        ({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}, True),
        ({"type": "function"}, False),
        ({"function": {"arguments": {}}}, False),
        ("add(1)", False),
        ({}, False),
    ],
)
def test_calls_are_in_the_form_of_openai_or_refused(call: Any, good: bool) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    if not good:
        with pytest.raises(BadLine, match=r"messages\[1\] has the tool call"):
            made(row, "sft")
        return
    [_, answer] = made(row, "sft").completion
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
