"""Lines that judge: formats, prompts that are implied, what is refused and where, and the tokens
that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tests.support.data_tokenizers import byte_level, template
from tests.support.tiny import CHATML, tokenizer
from tests.support.tiny_runs import write_lines
from tunesmith.config.schema import DataSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.data.preference import load_judged, load_pairs, load_steps
from tunesmith.learn.rewards.model import RewardModel
from tunesmith.types import Sample

TOKENIZER: Any = tokenizer()


def section(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> DataSection:
    return DataSection(train=str(write_lines(folder / "d.jsonl", lines)), **settings)


def texts(sample: Sample) -> tuple[str, str]:
    """What is not learned, and what is."""
    start = sample.loss_mask.index(True)
    assert all(sample.loss_mask[start:]), "one answer at the end"
    return TOKENIZER.decode(sample.token_ids[:start]), TOKENIZER.decode(sample.token_ids[start:])


def pair(folder: Path, line: dict[str, Any], **settings: Any) -> list[tuple[str, str]]:
    data = section(folder, [line], **settings)
    (item,) = load_pairs(data, data.train, TOKENIZER).items
    assert item.values["side"] == (1.0, -1.0)
    return [texts(sample) for sample in item.samples]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
TALKS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
    {"prompt": "2+2?", "chosen": [assistant("4")], "rejected": [assistant("5")]},
    {"chosen": [user("2+2?"), assistant("4")], "rejected": [user("2+2?"), assistant("5")]},
    {
        "prompt": "2+2?",
        "chosen": [user("2+2?"), assistant("4")],
        "rejected": [user("2+2?"), assistant("5")],
    },
]


@pytest.mark.parametrize("line", TALKS)
def test_every_format_of_a_conversation_is_the_same_pair(
    tmp_path: Path, line: dict[str, Any]
) -> None:
    assert pair(tmp_path, line) == [(ASKED, "4<|im_end|>"), (ASKED, "5<|im_end|>")]


@pytest.mark.parametrize("inside", ["", "<|im_end|>", "<|im_end|>\n"])
def test_an_answer_ends_with_its_turn_wherever_the_tags_of_its_template_end(
    tmp_path: Path, inside: str
) -> None:
    """A reward model is asked for the score at that token."""
    after = "<|im_end|>\n".removeprefix(inside)
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + INSIDE }}{% endgeneration %}{{ AFTER }}{% else %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for name, text in (("INSIDE", inside), ("AFTER", after)):
        marked = marked.replace(name, repr(text))
    data = section(tmp_path, [TALKS[0]])
    (item,) = load_pairs(data, data.train, tokenizer(marked)).items
    assert [texts(sample) for sample in item.samples] == [
        (ASKED, "4<|im_end|>"),
        (ASKED, "5<|im_end|>"),
    ]


def test_an_answer_may_be_a_call_of_a_tool(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    line = {
        "prompt": [user("2+2?")],
        "chosen": [{**assistant(""), "tool_calls": [call]}],
        "rejected": [assistant("5")],
    }
    data = section(tmp_path, [line])
    assert len(load_pairs(data, data.train, byte_level(template("qwen2"))).items) == 1


def test_plain_texts(tmp_path: Path) -> None:
    line = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    assert pair(tmp_path, line, chat=False) == [("2+2=", "4<eos>"), ("2+2=", "5<eos>")]
    whole = {"chosen": "Q: two? A: it is four", "rejected": "Q: two? A: it is five"}
    assert pair(tmp_path, whole, chat=False) == [
        ("Q: two? A: it is", " four<eos>"),
        ("Q: two? A: it is", " five<eos>"),
    ]


def test_margins_and_paired_judgements(tmp_path: Path) -> None:
    data = section(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}])
    assert load_pairs(data, data.train, TOKENIZER).items[0].values["margin"] == (2.0, 2.0)
    lines = [{"prompt": q, "chosen": q * 2, "rejected": q * 3} for q in "ab"]
    data = section(tmp_path, lines, chat=False)
    found = load_judged(data, data.train, TOKENIZER).items
    assert [item.values["side"] for item in found] == [(1.0, 1.0), (-1.0, -1.0)] * 2
    assert [texts(item.samples[0]) for item in found] == [
        ("a", "aa<eos>"), ("a", "aaa<eos>"), ("b", "bb<eos>"), ("b", "bbb<eos>"),
    ]  # fmt: skip
    assert [texts(item.samples[1]) for item in found] == [
        ("a", "bb<eos>"), ("a", "bbb<eos>"), ("b", "aa<eos>"), ("b", "aaa<eos>"),
    ]  # fmt: skip


def test_a_mismatch_is_no_longer_than_the_longest_of_the_data(tmp_path: Path) -> None:
    lines = [
        {"prompt": "p" * 9, "completion": "x", "label": True},
        {"prompt": "q", "completion": "y" * 8, "label": False},
    ]
    data = section(tmp_path, lines, chat=False)
    first, second = load_judged(data, data.train, TOKENIZER).items
    assert texts(first.samples[1]) == ("p" * 9, "yy") and len(first.samples[0].token_ids) == 11
    assert texts(second.samples[1]) == ("q", "x<eos>")
    same = section(
        tmp_path, [{"prompt": "p", "completion": c, "label": True} for c in "ab"], chat=False
    )
    with pytest.raises(DataError, match=r"KTO.*prompts"):
        load_judged(same, same.train, TOKENIZER)


def test_an_answer_to_another_prompt_is_found_from_half_the_data_ahead(tmp_path: Path) -> None:
    lines = [
        {"prompt": prompt, "completion": str(number), "label": True}
        for number, prompt in enumerate("aaaba")
    ]
    data = section(tmp_path, lines, chat=False)
    found = load_judged(data, data.train, TOKENIZER).items
    answers = ["3", "3", "3", "0", "3"]
    assert [texts(item.samples[1]) for item in found] == [
        (prompt, f"{answer}<eos>") for prompt, answer in zip("aaaba", answers, strict=True)
    ]


STEPS = {"prompt": "1+1+1?", "completions": ["two", "three"], "labels": [True, 0.25]}


def test_steps_are_judged_at_the_last_token_of_their_separator(tmp_path: Path) -> None:
    data = section(tmp_path, [STEPS], chat=False)
    (item,) = load_steps(data, data.train, TOKENIZER, "<s>").items
    assert TOKENIZER.decode(item.token_ids) == "1+1+1?two<s>three<s>" and item.labels == (1.0, 0.25)
    assert [TOKENIZER.decode(item.token_ids[: m + 1]) for m in item.marks] == [
        "1+1+1?two<s>",
        "1+1+1?two<s>three<s>",
    ]
    talk = section(tmp_path, [{**STEPS, "prompt": [user("2+2?")]}])
    (item,) = load_steps(talk, talk.train, TOKENIZER, "\n").items
    assert TOKENIZER.decode(item.token_ids) == f"{ASKED}two\nthree\n" and len(item.marks) == 2


TAGGED = "Q? Step 1: one ки\nStep 2: two ки"


@pytest.mark.parametrize(
    "tags", [TAGGED.replace("ки", "+", 1).replace("ки", "-"), ["+", "-"], [True, False], [1, 0.0]]
)
def test_steps_with_their_separators_in_a_text(tmp_path: Path, tags: Any) -> None:
    data = section(tmp_path, [{"input": TAGGED, "label": tags, "task": "x"}])
    (item,) = load_steps(data, data.train, TOKENIZER, "ки").items
    assert TOKENIZER.decode(item.token_ids) == TAGGED and item.labels == (1.0, 0.0)
    assert TOKENIZER.decode(item.token_ids[: item.marks[0] + 1]) == "Q? Step 1: one ки"
    assert item.marks[1] == len(item.token_ids) - 1


def test_a_text_with_separators_is_no_turn_beside_conversations(tmp_path: Path) -> None:
    talk = write_lines(tmp_path / "talk.jsonl", [STEPS])
    text = write_lines(tmp_path / "text.jsonl", [{"input": TAGGED, "label": ["+", "-"]}])
    data = DataSection(train=(str(talk), str(text)))
    asked, tagged = load_steps(data, data.train, TOKENIZER, "ки").items
    assert TOKENIZER.decode(asked.token_ids).startswith("<|im_start|>user\n1+1+1?<|im_end|>")
    assert TOKENIZER.decode(tagged.token_ids) == TAGGED and len(tagged.marks) == 2


@pytest.mark.parametrize(
    ("text", "tags", "reason"),
    [
        (TAGGED, ["+"], "2 separators and 1 labels"),
        (TAGGED, ["+", "good"], "the label 'good' is neither"),
        (TAGGED, [1, 2], "the label 2 is neither"),
        (TAGGED, 3, "'label' is 3, needs text or a list"),
        (TAGGED, TAGGED, "before label 1"),
        (TAGGED, TAGGED.replace("ки", "+", 1), "before label 2"),
        ("no step", ["+"], "is not in the text"),
        (TAGGED + " and more", ["+", "-"], "nothing may come after the last"),
        ("one кики", ["+", "-"], "every separator has to end a step"),
    ],
)
def test_texts_and_labels_that_do_not_agree_are_named(
    tmp_path: Path, text: str, tags: Any, reason: str
) -> None:
    data = section(tmp_path, [{"input": text, "label": tags}])
    with pytest.raises(DataError, match=r"d\.jsonl:1: ") as caught:
        load_steps(data, data.train, TOKENIZER, "ки")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("side", "labels", "text"),
    [
        ("truncate_right", (1.0,), "1+1+1?two<s>thre"),
        ("truncate_left", (0.25,), "?two<s>three<s>"[-16:]),
    ],
)
def test_steps_that_are_cut_off_lose_their_labels(
    tmp_path: Path, side: Any, labels: Any, text: str
) -> None:
    data = section(
        tmp_path,
        [STEPS],
        chat=False,
        max_tokens=16 if side == "truncate_right" else 9,
        too_long=side,
    )
    (item,) = load_steps(data, data.train, TOKENIZER, "<s>").items
    assert item.labels == labels and len(item.marks) == 1
    assert TOKENIZER.decode(item.token_ids) == (text if side == "truncate_right" else ">three<s>")


GOOD = {
    "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "judged": {"prompt": "q", "completion": "a", "label": True},
    "steps": STEPS,
}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("pairs", {"prompt": "q", "chosen": "a"}, "no column 'rejected'"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": ""}, "'rejected' is empty"),
    ("pairs", {"prompt": "q", "chosen": " \n", "rejected": "a"}, "'chosen' is empty"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "a"}, "the same, so nothing is preferred"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": {}}, "'rejected' is dict"),
    (
        "pairs",
        {"prompt": "q", "chosen": "a", "rejected": [assistant("b")]},
        "text and the other a conversation",
    ),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "x"}, "'margin' is 'x'"),
    (
        "pairs",
        {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant(" ")]},
        "'rejected' is empty",
    ),
    (
        "pairs",
        {"prompt": "q", "chosen": [user("a"), assistant("b")], "rejected": [user("a")]},
        "no answer: ",
    ),
    (
        "pairs",
        {
            "prompt": "q",
            "chosen": [user("a"), assistant("b")],
            "rejected": [user("c"), assistant("b")],
        },
        "in a turn of the user",
    ),
    ("pairs", {**TALKS[1], "tools": [{"name": "f"}]}, "no place for tools"),
    ("judged", {"prompt": "q", "completion": "a", "label": 1}, "'label' is 1, needs true"),
    ("judged", {"prompt": "q", "completion": "a", "label": "yes"}, "'label' is 'yes'"),
    ("judged", {"prompt": "q", "completion": "", "label": True}, "'completion' is empty"),
    ("judged", {"prompt": "q", "completion": "a"}, "no column 'label'"),
    ("steps", {**STEPS, "labels": [True]}, "2 steps in 'completions' and 1 'labels'"),
    ("steps", {**STEPS, "labels": [True, "+"]}, "label 2 is '+'"),
    ("steps", {**STEPS, "labels": [True, 1.5]}, "label 2 is 1.5"),
    ("steps", {**STEPS, "completions": ["a", " "]}, "step 2 of 'completions'"),
    ("steps", {**STEPS, "completions": []}, "needs a list of steps"),
    ("steps", {**STEPS, "completions": "a"}, "needs a list of steps"),
    ("steps", {"prompt": "", "completions": "a", "labels": []}, "'prompt' is empty"),
]
LOAD: dict[str, Any] = {
    "pairs": load_pairs,
    "judged": load_judged,
    "steps": lambda s, source, t: load_steps(s, source, t, "\n"),
}


@pytest.mark.parametrize(("goal", "line", "reason"), BAD)
def test_bad_lines_are_named_or_skipped(
    tmp_path: Path, goal: str, line: dict[str, Any], reason: str
) -> None:
    lines = [GOOD[goal], line, {**GOOD[goal], "prompt": "other"}]
    data = section(tmp_path, lines)
    with pytest.raises(DataError) as caught:
        LOAD[goal](data, data.train, TOKENIZER)
    assert f"d.jsonl:2: {reason}" in str(caught.value) or (
        ":2: " in str(caught.value) and reason in str(caught.value)
    )
    data = section(tmp_path, lines, skip_bad=True)
    found = LOAD[goal](data, data.train, TOKENIZER)
    assert len(found.items) == 2 and found.report.counts["bad"] == 1


@pytest.mark.parametrize(
    ("goal", "line", "words"),
    [
        (
            "pairs",
            {"prompt": "q", "chosen": "a", "rejcted": "b"},
            ["no rejected", "rejcted", "Did you mean 'rejcted'?"],
        ),
        (
            "pairs",
            {"prompt": "q", "completion": "a"},
            ["no chosen and no rejected", "prompt, completion"],
        ),
        ("judged", {"prompt": "q", "completion": "a"}, ["no label", "'chosen' and 'rejected'"]),
        ("steps", {"prompt": "q", "completions": ["a"]}, ["no labels"]),
    ],
)
def test_the_first_line_shows_what_is_missing(
    tmp_path: Path, goal: str, line: dict[str, Any], words: list[str]
) -> None:
    data = section(tmp_path, [line])
    with pytest.raises(DataError) as caught:
        LOAD[goal](data, data.train, TOKENIZER)
    assert all(word in str(caught.value) for word in [*words, "d.jsonl:1"]), str(caught.value)


def test_limits(tmp_path: Path) -> None:
    lines = [GOOD["pairs"], {"prompt": "q", "chosen": "a" * 20, "rejected": "b"}]

    def load(room: int | None = None, share: bool = True, **settings: Any) -> Any:
        data = section(tmp_path, lines, chat=False, **settings)
        return load_pairs(data, data.train, TOKENIZER, room=room, share=share)

    with pytest.raises(DataError, match=r"d\.jsonl:2: 22 tokens, the limit is 10"):
        load(max_tokens=10)
    assert len(load(max_tokens=10, too_long="skip").items) == 1
    cut = load(max_tokens=10, too_long="truncate_right").items[1].samples[0]
    assert texts(cut) == ("q", "a" * 9)
    assert len(load(room=24).items) == 2, "the prompt counts once"
    with pytest.raises(
        DataError, match=r"d\.jsonl:2: .*24 tokens together.*max_tokens_per_microbatch"
    ):
        load(room=23)
    with pytest.raises(DataError, match="25 tokens together"):
        load(room=24, share=False)
    same = [{"prompt": "q", "chosen": "abcd", "rejected": "abce"}]
    data = section(tmp_path, same, chat=False, max_tokens=4, too_long="truncate_right")
    with pytest.raises(DataError, match="the same once they are tokenized and cut"):
        load_pairs(data, data.train, TOKENIZER)


@pytest.mark.parametrize("head", ["", "<bos>"])
@pytest.mark.parametrize(
    ("answers", "cut"),
    [
        (("a" * 8, "bb"), ("6789" + "a" * 8, "6789bb")),
        (("aa", "b" * 8), ("6789aa", "6789" + "b" * 8)),
        (("a" * 14, "bb"), ("a" * 12, "bb")),
    ],
)
def test_a_cut_on_the_left_leaves_both_answers_the_same_prompt(
    tmp_path: Path, answers: tuple[str, str], cut: tuple[str, str], head: str
) -> None:
    cutting: Any = tokenizer(None)
    if head:
        bos = ("<bos>", cutting.bos_token_id)
        cutting.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", None, [bos])
    lines = [{"prompt": "0123456789", "chosen": answers[0], "rejected": answers[1]}]
    data = section(tmp_path, lines, max_tokens=13 + bool(head), too_long="truncate_left")
    (item,) = load_pairs(data, data.train, cutting).items
    found = [cutting.decode(sample.token_ids) for sample in item.samples]
    assert found == [f"{head}{text}<eos>" for text in cut]


@pytest.mark.parametrize(
    ("chat", "prompt", "answer"), [(False, "2+2=a", "a4"), (True, "?", "\n\n4")]
)
def test_a_reward_model_scores_the_tokens_that_it_was_trained_on(
    tmp_path: Path, chat: bool, prompt: str, answer: str
) -> None:
    """Also where a token would cross the border between prompt and answer."""
    joining: Any = tokenizer(CHATML if chat else None, [("a", "a"), ("Ċ", "Ċ")])
    data = section(tmp_path, [{"prompt": prompt, "chosen": answer, "rejected": "5"}])
    (item,) = load_pairs(data, data.train, joining).items
    model = RewardModel(lambda _: [], joining, None, ChatTemplate.of(joining) if chat else None)
    trained = item.samples[0].token_ids
    assert model.encode(prompt, answer) == trained
    assert joining(joining.decode(trained), add_special_tokens=False)["input_ids"] != trained


@pytest.mark.parametrize(("goal", "settings", "key"), [
    ("pairs", {"loss_on": "all"}, "data.loss_on"),
    ("pairs", {"completion": "chosen"}, "data.completion"),
    ("steps", {"completion": "completions"}, "data.completion"),
    ("judged", {"max_prompt_tokens": 4}, "data.max_prompt_tokens"),
    ("steps", {"chat": True}, "data.chat"),
])  # fmt: skip
def test_settings_that_would_be_ignored_are_refused(
    tmp_path: Path, goal: str, settings: Any, key: str
) -> None:
    line = {"input": TAGGED, "label": ["+", "-"]} if key == "data.chat" else GOOD[goal]
    data = section(tmp_path, [line], **settings)
    with pytest.raises(ConfigError, match=key):
        LOAD[goal](data, data.train, TOKENIZER)
