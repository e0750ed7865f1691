"""Assistant masks are token-exact on the public chat formats, or the template is refused by
name."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import data_tokenizers as kit
from tests.support.documents import ROOT
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data.chat import (
    MOST_TURNS,
    ChatTemplate,
    Rendered,
    end_of_turn_id,
    end_of_turn_ids,
)
from tunesmith.learn.data.chat_defaults import set_defaults, without_system_prompt
from tunesmith.learn.data.tokens import encode_with_offsets, mask_spans

THINK = "<think>\n\n</think>\n\n"

# What each format has the assistant write for a turn, given its content.
FAMILIES: dict[str, Callable[[str], str]] = {
    "chatml": lambda c: c + "<|im_end|>",
    "hermes": lambda c: c + "<|im_end|>",
    "smollm2": lambda c: c + "<|im_end|>",
    "smollm3_marked": lambda c: c + "<|im_end|>",
    "qwen2": lambda c: c + "<|im_end|>",
    "qwen3": lambda c: THINK + c.lstrip("\n") + "<|im_end|>",
    "qwen3_thinking": lambda c: "\n</think>\n\n" + c.lstrip("\n") + "<|im_end|>",
    "llama3": lambda c: c.strip() + "<|eot_id|>",
    "llama2": lambda c: " " + c.strip() + " </s>",
    "gemma": lambda c: c.strip() + "<end_of_turn>",
    "mistral_v1": lambda c: " " + c + "</s>",
    "mistral_v3": lambda c: c.strip() + "</s>",
    "phi3": lambda c: c + "<|end|>",
    "phi4": lambda c: c + "<|im_end|>",
}
KEEPS_EARLIER_TURNS = sorted(set(FAMILIES) - {"qwen3", "qwen3_thinking"})

# Letters, blanks, line breaks, several-byte and several-token characters, and look-alikes of
# markup.
WORD = st.text(st.sampled_from("ab C.1\n\té中🙂<|{%"), min_size=1, max_size=12)
CONTENT = WORD.filter(lambda text: text.strip() != "").map(
    lambda text: unicodedata.normalize("NFC", text)
)
TALK = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


@cache
def tokenizer(family: str, kind: str) -> Any:
    return kit.KINDS[kind](kit.template(family))


@cache
def template(family: str, kind: str = "byte_level") -> ChatTemplate:
    return ChatTemplate.of(tokenizer(family, kind))


def conversation(talk: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        message
        for asked, answered in talk
        for message in (
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
        )
    ]


def runs(tok: Any, text: Rendered) -> tuple[list[str], str]:
    """The decoded runs of learned tokens, and all tokens decoded."""
    ids, mask = mask_spans(tok, text.text, next(encode_with_offsets(tok, [text.text])), text.spans)
    assert len(ids) == len(mask)
    found: list[list[int]] = []
    for i, (token, learn) in enumerate(zip(ids, mask, strict=True)):
        if learn and (i == 0 or not mask[i - 1]):
            found.append([])
        if learn:
            found[-1].append(token)
    # The decoder of a metaspace tokenizer strips the first blank of a text, so decode after another
    # token.
    start = tok.convert_tokens_to_ids("<s>")
    return [tok.decode([start, *run])[3:] for run in found], tok.decode(ids)


@pytest.mark.parametrize("kind", kit.KINDS)
@pytest.mark.parametrize("family", KEEPS_EARLIER_TURNS)
@settings(max_examples=15, deadline=None)
@given(talk=TALK)
def test_learned_tokens_are_exactly_the_assistants(
    family: str, kind: str, talk: list[tuple[str, str]]
) -> None:
    tok = tokenizer(family, kind)
    texts = template(family, kind).learned(conversation(talk))
    assert len(texts) == 1
    learned, whole = runs(tok, texts[0])
    assert learned == [FAMILIES[family](answer) for _, answer in talk]
    assert whole == tok.decode(tok(texts[0].text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", kit.KINDS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_thinking"])
@settings(max_examples=15, deadline=None)
@given(talk=TALK)
def test_a_template_that_strips_thinking_is_learned_turn_by_turn(
    family: str, kind: str, talk: list[tuple[str, str]]
) -> None:
    """Each turn is learned once, in the very context and form in which it would be sampled."""
    tok = tokenizer(family, kind)
    messages = conversation(talk)
    texts = template(family, kind).learned(messages)
    assert len(texts) == len(talk)
    for i, (text, (_, answer)) in enumerate(zip(texts, talk, strict=True)):
        assert runs(tok, text)[0] == [FAMILIES[family](answer)]
        prompt = tok.apply_chat_template(
            messages[: 2 * i + 1], tokenize=False, add_generation_prompt=True
        )
        assert text.text[: text.spans[0][0]] == prompt


def test_qwen3_thinking_is_learned_and_earlier_thinking_is_not_shown() -> None:
    messages = conversation(
        [("1+1?", "<think>\nadd\n</think>\n\n2"), ("2+2?", "<think>\nmore\n</think>\n\n4")]
    )
    first, second = template("qwen3").learned(messages)
    assert first.text[slice(*first.spans[0])] == "<think>\nadd\n</think>\n\n2<|im_end|>"
    assert second.text[slice(*second.spans[0])] == "<think>\nmore\n</think>\n\n4<|im_end|>"
    assert "add" not in second.text and "<|im_start|>assistant\n2<|im_end|>" in second.text


def test_qwen3_tool_steps_after_one_question_stay_one_text() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "done"},
    ]
    (text,) = template("qwen3").learned(messages)
    assert [text.text[a:b] for a, b in text.spans] == [
        (
            '<think>\nuse it\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
            "</tool_call><|im_end|>"
        ),
        "<think>\ndone\n</think>\n\n2<|im_end|>",
    ]


@pytest.mark.parametrize("family", ["qwen2", "llama3"])
def test_tool_calls_are_learned_and_answers_of_tools_are_not(family: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "SECRET"},
        {"role": "assistant", "content": "2"},
    ]
    (text,) = template(family).learned(messages)
    called, answered = (text.text[a:b] for a, b in text.spans)
    assert '{"name": "add"' in called and called.endswith(("<|im_end|>", "<|eot_id|>"))
    assert answered in ("2<|im_end|>", "2<|eot_id|>")
    assert "SECRET" in text.text


def test_mistral_moves_the_system_prompt_so_each_turn_has_its_own_text() -> None:
    messages = [{"role": "system", "content": "be brief"}, *conversation([("a", "b"), ("c", "d")])]
    first, second = template("mistral_v3").learned(messages)
    assert first.text == "<s>[INST]be brief\n\na[/INST]b</s>"
    assert second.text == "<s>[INST]a[/INST]b</s>[INST]be brief\n\nc[/INST]d</s>"
    assert [first.text[a:b] for a, b in first.spans] == ["b</s>"]
    assert [second.text[a:b] for a, b in second.spans] == ["d</s>"]


def test_only_turns_from_first_on_are_learned() -> None:
    (text,) = template("chatml").learned(conversation([("a", "b"), ("c", "d")]), first=2)
    assert [text.text[a:b] for a, b in text.spans] == ["d<|im_end|>"]


def test_text_after_the_last_assistant_turn_is_left_out() -> None:
    (text,) = template("chatml").learned(
        [*conversation([("a", "b")]), {"role": "user", "content": "bye"}]
    )
    assert "bye" not in text.text


def test_a_template_without_special_tokens_is_learned_to_the_end_of_the_line() -> None:
    found = template("plain_roles")
    (text,) = found.learned(conversation([("a", "b"), ("c", "d")]))
    assert [text.text[a:b] for a, b in text.spans] == ["b\n", "d\n"]
    assert not found.ends_turns


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        ("deepseek_r1", conversation([("a", "b")]), "continues after '<think>\\n'"),
        ("no_generation_prompt", conversation([("a", "b")]), "no generation prompt"),
        ("gemma", [{"role": "user", "content": "a"}] * 2, "must alternate"),
        ("chatml", [{"role": "assistant", "content": "hi"}], "begins with the assistant"),
    ],
)
def test_what_cannot_be_masked_exactly_is_refused(
    family: str, messages: list[Any], reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        template(family).learned(
            [*messages, *conversation([("x", "y")])] if family == "gemma" else messages
        )
    assert reason in str(caught.value)


def test_a_template_that_drops_part_of_the_turn_is_refused() -> None:
    source = kit.template("chatml").replace(
        "message.content +", "message.content.split('</think>')[-1] +"
    )
    found = ChatTemplate.of(kit.byte_level(source))
    with pytest.raises(DataError, match="changes or drops part"):
        found.learned(conversation([("a", "<think>hm</think>b")]))


def test_marks_that_miss_a_turn_are_refused() -> None:
    source = kit.template("smollm3_marked").replace(
        "'assistant' -%}", "'assistant' and loop.index0 > 1 -%}", 1
    )
    found = ChatTemplate.of(kit.byte_level(source))
    with pytest.raises(DataError, match=r"do not mark .* message 2"):
        found.learned(conversation([("a", "b")]))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOL = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "assistant", "content": "2"},
]
WITH_THOUGHT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "hm"},
]


@pytest.mark.parametrize(
    "family",
    ["chatml", "smollm2", "smollm3_marked", "llama2", "phi3", "phi4", "mistral_v3", "gemma"],
)
def test_a_part_of_a_message_that_the_template_does_not_write_is_refused_by_name(
    family: str,
) -> None:
    found = template(family)
    for messages, what in ((WITH_TOOL[:2], "a tool call"), (WITH_THOUGHT, "'reasoning_content'")):
        with pytest.raises(DataError, match=rf"(leaves out {what}|refuses this conversation)"):
            found.learned(messages)
    with pytest.raises(
        DataError,
        match=r"leaves out|refuses this conversation|changes or drops|cannot be determined",
    ):
        found.learned(WITH_TOOL)
    for key in ("reasoning", "thinking"):
        with pytest.raises(DataError, match=f"leaves out '{key}'"):
            found.learned(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "hm"}]
            )


def test_arguments_answers_and_names_that_are_not_written_are_refused_in_prompts_too() -> None:
    source = kit.template("qwen2")
    assert template("qwen2").learned(WITH_TOOL) and template("qwen2").whole(
        WITH_TOOL[:3], prompt=True
    )
    named = [{"role": "user", "name": "Ann", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"the name of message 1 \(user\)"):
        template("qwen2").learned(named)
    with pytest.raises(DataError, match=r"the name of message 1"):
        template("qwen2").whole(named[:1], prompt=True)
    for old, new, what in (
        ("call.function.arguments | tojson", "'{}'", "a tool call's arguments of message 2"),
        (
            "+ message.content + '\\n</tool_response>'",
            "+ '\\n</tool_response>'",
            "the tool's answer of message 3",
        ),
    ):
        assert old in source
        found = ChatTemplate.of(kit.byte_level(source.replace(old, new)))
        for refused in (
            lambda f: f.learned(WITH_TOOL),
            lambda f: f.whole(WITH_TOOL[:3], prompt=True),
        ):
            with pytest.raises(DataError, match=what):
                refused(found)


NAMED = {
    "ChatML": "chatml",
    "SmolLM2": "smollm2",
    "Phi-3": "phi3",
    "Phi-4": "phi4",
    "Gemma": "gemma",
    "Llama 2": "llama2",
    "Mistral": "mistral_v3",
    "Llama 3.1": "llama3",
    "Qwen2.5": "qwen2",
    "Qwen3": "qwen3",
    "SmolLM3 with `{% generation %}` tags": "smollm3_marked",
    "Qwen3-Thinking-2507": "qwen3_thinking",
    "DeepSeek-R1": "deepseek_r1",
}


def test_the_page_says_what_templates_hold() -> None:
    def learns(family: str, messages: list[dict[str, Any]]) -> bool:
        try:
            return bool(template(family).learned(messages))
        except DataError:
            return False

    page = (ROOT / "docs" / "data.md").read_text()
    rows = [
        line.strip("|").split(" | ")
        for line in page[page.index("| templates | turns |") :].splitlines()[2:]
        if line
    ]
    seen: set[str] = set()
    for names, turns, tools, thinking in (row for row in rows if len(row) == 4):
        for family in [NAMED[name] for name in names.strip().split(", ") if name in NAMED]:
            seen.add(family)
            marked = family == "smollm3_marked"
            assert learns(family, conversation([("a", "b")])) == (turns == "yes"), family
            assert learns(family, WITH_TOOL) == (tools.startswith("yes") and not marked), family
            assert learns(family, WITH_THOUGHT) == (
                "reasoning_content" in thinking and not marked
            ), family
            assert learns(family, conversation([("a", "<think>\nhm\n</think>\n\nb")])), family
    assert seen == set(NAMED.values())


@pytest.mark.parametrize("family", ["qwen3_thinking", "deepseek_r1"])
def test_thinking_in_the_content_is_learned_behind_a_prompt_that_opens_it(family: str) -> None:
    messages = conversation(
        [("1+1?", "<think>\nadd\n</think>\n\n2"), ("2+2?", "<think>\nmore\n</think>\n\n4")]
    )
    texts = template(family).learned(messages)
    for number, (text, thought, answer) in enumerate(
        zip(texts, ("add", "more"), "24", strict=True)
    ):
        prompt = template(family).render(messages[: 2 * number + 1], prompt=True)
        [(start, stop)] = text.spans
        assert prompt.endswith("<think>\n") and text.text[:start] == prompt
        learned = text.text[start:stop]
        assert (
            learned.startswith(f"{thought}\n</think>\n\n{answer}") and learned.count("<think>") == 0
        )
        assert learned.endswith(template(family).stop_marker)
    with pytest.raises(DataError):
        template("deepseek_r1").learned(conversation([("1+1?", "2")]))


def test_what_follows_the_end_of_an_answer_is_learned_up_to_the_eos() -> None:
    """Cohere's turns end with two special tokens, of which the second is the model's EOS."""
    for tail, expected in (
        ("<|end|></s>", "<|end|></s>"),
        ("<|end|><|eot_id|>", "<|end|>"),
        ("</s><|end|>", "</s>"),
    ):
        tok = kit.byte_level(kit.template("phi3").replace("<|end|>", tail))
        found = ChatTemplate.of(tok)
        assert found.stop_marker.strip() == expected and found.ends_turns
        assert found.turn_ends[0] == expected and found.turn_ends[-1] == tail[: tail.index(">") + 1]
        assert end_of_turn_ids(tok) == tok(expected, add_special_tokens=False)["input_ids"]
        assert (
            end_of_turn_id(tok)
            == tok.convert_tokens_to_ids(["</s>" if "</s>" in expected else "<|end|>"])[0]
        )


class Counting:
    """A tokenizer that counts how often a conversation is rendered."""

    def __init__(self, tok: Any) -> None:
        self.tok = tok
        self.rendered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tok, name)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        self.rendered += 1
        return self.tok.apply_chat_template(*args, **options)


def test_long_conversations_are_rendered_a_fixed_number_of_times_or_refused() -> None:
    counting: Any = Counting(tokenizer("chatml", "byte_level"))
    found = ChatTemplate.of(counting)
    counting.rendered = 0
    long = conversation([("a", "b")] * (MOST_TURNS + 1))
    with pytest.raises(DataError, match=f"{MOST_TURNS + 1} assistant turns"):
        found.learned(long)
    assert counting.rendered == 0
    assert len(found.learned(long, first=len(long) - 1)[0].spans) == 1
    assert counting.rendered <= 3
    found.whole(
        [{"role": role, "content": "a"} for role in ("user", "assistant")] * 10_000 + [long[0]],
        prompt=True,
    )
    assert counting.rendered <= 5


def thinking_off(tok: Any, **options: Any) -> Any:
    made = copy.deepcopy(tok)
    set_defaults(made, None, options or {"enable_thinking": False})
    return made


def test_variables_of_the_template_reach_every_rendering() -> None:
    off = ChatTemplate.of(thinking_off(tokenizer("qwen3", "byte_level")))
    messages = conversation([("a", "b"), ("c", "d")])
    assert off.whole(messages[:1], prompt=True).endswith("<|im_start|>assistant\n" + THINK)
    assert template("qwen3").whole(messages[:1], prompt=True).endswith("<|im_start|>assistant\n")
    for text, answer in zip(off.learned(messages), "bd", strict=True):
        assert [text.text[a:b] for a, b in text.spans] == [f"{answer}<|im_end|>"], (
            "the empty thinking is not its own"
        )
    from tunesmith.learn.environments.rendering import ChatRenderer

    ids = ChatRenderer(off).whole(messages[:1], None)
    assert off.tokenizer.decode(ids).endswith(THINK)
    source = "{%- if shout -%}{{ '!' }}{%- endif -%}" + kit.template("smollm3_marked")
    marked = ChatTemplate.of(thinking_off(kit.byte_level(source), shout=True))
    assert marked.marks_assistant and marked.learned(messages)[0].text.startswith("!")


@pytest.mark.parametrize("named", [False, True])
def test_questions_to_the_policy_as_a_judge_lack_the_system_message(named: bool) -> None:
    run = copy.deepcopy(tokenizer("qwen3", "byte_level"))
    if named:
        run.chat_template = {"default": run.chat_template, "tool_use": run.chat_template}
    thinking = {"enable_thinking": False}
    set_defaults(run, "Be brief.", thinking)
    asked = without_system_prompt(run, thinking)
    before, after = (
        ChatTemplate.of(each).whole([{"role": "user", "content": "a"}], prompt=True)
        for each in (run, asked)
    )
    assert "Be brief." in before and "Be brief." not in after
    assert before.endswith(after) and after.endswith(THINK)


@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("qwen3", "enable_thinkin", "enable_thinking"),
        ("chatml", "enable_thinking", "reads none"),
        ("qwen3", "messages", "the rendering sets it"),
        ("qwen3", "add_generation_prompt", "the rendering sets it"),
        ("mistral_v3", "bos_token", "the rendering sets it"),
        ("smollm3_marked", "namespace", "does not read 'namespace'"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused_by_name(
    family: str, name: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        thinking_off(tokenizer(family, "byte_level"), **{name: False})
    assert (
        name in str(caught.value)
        and told in str(caught.value)
        and "data.chat_template_kwargs" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("family", "reason"), [("gemma", "not supported"), ("drops_system", "leaves out message 1")]
)
def test_a_system_message_that_the_template_cannot_hold_is_refused(
    family: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        template(family).check_system()


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    talk = conversation([("a", "b")])
    with pytest.raises(DataError, match=r"leaves out message 1 \(developer: 'be brief'\)"):
        template("qwen2").learned([{"role": "developer", "content": "be brief"}, *talk])
    with pytest.raises(DataError, match="leaves out message 1"):
        template("qwen2").whole(
            [{"role": "developer", "content": "be brief"}, talk[0]], prompt=True
        )
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert '"add"' in template("qwen2").whole(talk[:1], tools, prompt=True)
    with pytest.raises(DataError, match="no place for tools"):
        template("chatml").whole(talk[:1], tools, prompt=True)


def test_no_template_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        ChatTemplate.of(kit.byte_level())


def test_a_template_that_is_no_jinja_is_told_with_its_line() -> None:
    tok = kit.byte_level()
    tok.chat_template = "{% for message in messages %}\n{{ message.content }\n{% endfor %}"
    with pytest.raises(ConfigError, match="line 2") as caught:
        ChatTemplate.of(tok)
    assert caught.value.keys == ("model.chat_template",)


@pytest.mark.parametrize(
    ("family", "token"),
    [
        ("chatml", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma", "<end_of_turn>"),
        ("phi3", "<|end|>"),
        ("mistral_v1", "</s>"),
        ("plain_roles", None),
    ],
)
def test_end_of_turn_id(family: str, token: str | None) -> None:
    tok = tokenizer(family, "byte_level")
    assert end_of_turn_id(tok) == (None if token is None else tok.convert_tokens_to_ids(token))


@pytest.mark.parametrize("kind", kit.KINDS)
@settings(max_examples=60, deadline=None)
@given(left=WORD, middle=WORD, right=WORD)
def test_any_span_of_any_text_is_cut_exactly(kind: str, left: str, middle: str, right: str) -> None:
    tok = kit.KINDS[kind]()
    text = unicodedata.normalize("NFC", left + middle + right)
    if len(text) != len(left + middle + right):
        return
    spans = [(len(left), len(left) + len(middle))]
    learned, whole = runs(tok, Rendered(text, tuple(spans)))
    assert learned == [middle]
    assert whole == tok.decode(tok(text, add_special_tokens=False)["input_ids"])
