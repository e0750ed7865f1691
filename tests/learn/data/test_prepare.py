"""From files to tasks and samples: prompts, masks, limits, mixtures, and the account of every
line."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support import data_tokenizers as kit
from tests.support import tiny
from tunesmith.config.schema import DataSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data import reading
from tunesmith.learn.data.preference import load_judged, load_pairs, load_steps
from tunesmith.learn.data.prepare import SampleSet, TaskSet, load_samples, load_tasks, peek
from tunesmith.types import Sample

SUMS = [{"question": f"{i}+{i}?", "answer": str(2 * i), "level": i} for i in range(6)]


def put(path: Path, rows: list[dict[str, Any]], extra: str = "") -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + extra, encoding="utf-8")
    return str(path)


def tasks(train: Any, tokenizer: Any, **settings: Any) -> TaskSet:
    section = DataSection(train=train, **settings)
    return load_tasks(section, section.train, tokenizer)


def samples(train: Any, tokenizer: Any, **settings: Any) -> SampleSet:
    section = DataSection(train=train, **settings)
    return load_samples(section, section.train, tokenizer)


def learned(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """All of a sample, and what of it is learned."""
    assert len(sample.token_ids) == len(sample.loss_mask) and not sample.loss_mask[0]
    chosen = [
        token for token, learn in zip(sample.token_ids, sample.loss_mask, strict=True) if learn
    ]
    return tokenizer.decode(sample.token_ids), tokenizer.decode(chosen)


def with_bos(tokenizer: Any, eos: bool = False) -> Any:
    """A tokenizer that puts BOS before a text of its own accord (and EOS after it)."""
    from tokenizers import processors

    core = tokenizer._tokenizer
    ids = [
        (token, tokenizer.convert_tokens_to_ids(token))
        for token in (tokenizer.bos_token, tokenizer.eos_token)
    ]
    single = f"{ids[0][0]} $A" + (f" {ids[1][0]}" if eos else "")
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


def test_text_prompts_go_through_the_template_and_other_columns_are_passed_on(
    tmp_path: Path,
) -> None:
    tok = tiny.tokenizer()
    path = put(tmp_path / "a.jsonl", SUMS)
    made = tasks(path, tok)
    task = made.items[2]
    assert (
        tok.decode(task.prompt_ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert task.prompt == "2+2?" and task.id == f"{path}:3"
    assert task.columns == {"question": "2+2?", "answer": "4", "level": 2}
    assert made.report.counts == {"read": 6, "kept": 6, "truncated": 0, "bad": 0, "too_long": 0}
    assert made.report.formats == [f"{path}: prompts in 'question'"]
    assert sorted(t.id for t in made.loader(6, seed=1).next_batch()) == sorted(
        t.id for t in made.items
    )


def test_plain_prompts_get_what_the_tokenizer_puts_before_a_text_once(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", [{"prompt": "ab"}, {"prompt": "<bos>ab"}])
    tok = with_bos(tiny.tokenizer(None), eos=True)
    first, second = tasks(path, tok).items
    assert (
        first.prompt_ids
        == second.prompt_ids
        == (1, *tok("ab", add_special_tokens=False)["input_ids"])
    )
    without = tasks(path, tiny.tokenizer(), chat=False).items[0]
    assert without.prompt_ids == first.prompt_ids[1:]


def test_a_template_that_writes_bos_does_not_double_it(tmp_path: Path) -> None:
    tok = with_bos(kit.byte_level(kit.template("llama3")))
    (task,) = tasks(put(tmp_path / "a.jsonl", [{"prompt": "hi"}]), tok).items
    assert list(task.prompt_ids).count(tok.bos_token_id) == 1
    (sample,) = samples(
        put(tmp_path / "b.jsonl", [{"prompt": "hi", "completion": "ho"}]), tok
    ).items
    assert sample.token_ids.count(tok.bos_token_id) == 1
    assert sample.token_ids[: len(task.prompt_ids)] == list(task.prompt_ids)


def test_system_prompt(tmp_path: Path) -> None:
    tok = tiny.tokenizer()
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]
    path = put(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": own}])
    first, second = tasks(path, tok, system_prompt="brief").items
    assert tok.decode(first.prompt_ids).startswith(
        "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\nx"
    )
    assert tok.decode(second.prompt_ids).startswith("<|im_start|>system\nmine<|im_end|>\n")
    plain = put(tmp_path / "b.jsonl", SUMS)
    with pytest.raises(ConfigError, match="system_prompt needs a chat template"):
        tasks(plain, tok, chat=False, system_prompt="brief")
    with pytest.raises(ConfigError, match="System role not supported"):
        tasks(path, kit.byte_level(kit.template("gemma")), system_prompt="brief")


def test_chat_settings_that_do_not_fit(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    talk = put(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ConfigError, match="no chat template"):
        tasks(path, tiny.tokenizer(None), chat=True)
    with pytest.raises(ConfigError, match="no chat template"):
        tasks(talk, tiny.tokenizer(None))
    with pytest.raises(ConfigError, match=r"b\.jsonl:1 is a conversation"):
        tasks(talk, tiny.tokenizer(), chat=False)


def test_ids_from_a_column_stay_unique(tmp_path: Path) -> None:
    a = put(
        tmp_path / "a.jsonl", [{"prompt": "x", "id": 1}, {"prompt": "y", "id": 1}, {"prompt": "z"}]
    )
    assert [t.id for t in tasks(a, tiny.tokenizer()).items] == ["1", f"1 ({a}:2)", f"{a}:3"]
    b = put(tmp_path / "b.jsonl", [{"prompt": "x", "id": 1}])
    ids = [t.id for t in tasks((a, b), tiny.tokenizer()).items]
    assert ids == [f"{a}#1", f"{a}#1 ({a}:2)", f"{a}:3", f"{b}#1"]
    twice = [t.id for t in tasks((a, a), tiny.tokenizer()).items]
    assert len(set(twice)) == 6 and twice[5] == f"{a}:3 (source 2)"


def test_a_bad_line_stops_with_its_place_or_is_skipped_counted_and_listed(tmp_path: Path) -> None:
    path = put(
        tmp_path / "a.jsonl", SUMS, '3\n{"question": null}\n{"answer": 1}\n{"question": "cut'
    )
    with pytest.raises(DataError, match=r"a\.jsonl:7: holds a number, .*\(data\.skip_bad"):
        tasks(path, tiny.tokenizer())
    report = tasks(path, tiny.tokenizer(), skip_bad=True).report
    assert report.counts == {"read": 10, "kept": 6, "truncated": 0, "bad": 4, "too_long": 0}
    assert [skip.where.rsplit(":", 1)[1] for skip in report.skipped] == ["7", "8", "9", "10"]
    assert (
        "6 of 10 lines used, 4 bad and skipped" in report.summary()
        and "and 1 more" in report.summary()
    )
    report.write_skipped(tmp_path / "skipped.jsonl")
    written = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert written[1] == {"where": f"{path}:8", "kind": "bad", "reason": "'question' is null"}


def test_a_column_without_a_name_is_no_context(tmp_path: Path) -> None:
    path = tmp_path / "frame.csv"
    path.write_text(",prompt,answer\n0,1+1=,2\n1,2+2=,4\n")  # as pandas writes its index
    found = tasks(str(path), tiny.tokenizer())
    assert [task.prompt for task in found.items] == ["1+1=", "2+2="]


def test_a_bad_first_line_does_not_decide_the_format(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", [{"x": 1}, *SUMS])
    assert len(tasks(path, tiny.tokenizer(), skip_bad=True)) == 6
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: no prompt; found columns: x; needs one of prompt"
    ):
        tasks(path, tiny.tokenizer())


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    for load in (tasks, samples):
        with pytest.raises(DataError, match="empty, there is no line of data"):
            load(str(tmp_path / name), tiny.tokenizer())
    with pytest.raises(DataError, match="empty"):
        peek(DataSection(train="x"), str(tmp_path / name), "rl")


def test_nothing_usable_is_refused_with_the_reasons(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", [{"question": None}, {"question": True}])
    with pytest.raises(
        DataError, match=r"(?s)no usable line.*0 of 2 lines used, 2 bad.*'question' is null"
    ):
        tasks(path, tiny.tokenizer(), skip_bad=True)
    long = put(tmp_path / "b.jsonl", SUMS)
    with pytest.raises(DataError, match=r"(?s)no usable line.*6 too long and skipped"):
        tasks(long, tiny.tokenizer(), max_prompt_tokens=3, too_long="skip")


def test_a_prompt_over_the_limit(tmp_path: Path) -> None:
    tok = tiny.tokenizer(None)
    path = put(tmp_path / "a.jsonl", [{"prompt": "short"}, {"prompt": "0123456789"}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: the prompt has 10 tokens, the limit is 8"):
        tasks(path, tok, max_prompt_tokens=8, skip_bad=True)
    skipped = tasks(path, tok, max_prompt_tokens=8, too_long="skip")
    assert len(skipped) == 1 and skipped.report.counts["too_long"] == 1
    left = tasks(path, tok, max_prompt_tokens=8, too_long="truncate_left")
    assert left.items[1].prompt == tok.decode(left.items[1].prompt_ids) == "23456789"
    right = tasks(path, tok, max_prompt_tokens=8, too_long="truncate_right")
    assert tok.decode(right.items[1].prompt_ids) == "01234567" and right.report.truncated == 1
    bos = tasks(path, with_bos(tok), max_prompt_tokens=8, too_long="truncate_left").items[1]
    assert tok.decode(bos.prompt_ids) == "<bos>3456789"


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
JUDGED = {"prompt": "q", "completion": "a", "label": True}
STEPS = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}


@pytest.mark.parametrize(
    ("load", "limit", "line"),
    [
        (load_tasks, "max_prompt_tokens", {"prompt": "q"}),
        (load_samples, "max_tokens", {"prompt": "q", "completion": "a"}),
        (load_pairs, "max_tokens", PAIR),
        (load_judged, "max_tokens", JUDGED),
        (partial(load_steps, separator="\n"), "max_tokens", STEPS),
    ],
    ids=["tasks", "samples", "pairs", "judged", "steps"],
)
@pytest.mark.parametrize("chat", [False, True])
def test_of_a_text_that_is_far_too_long_only_the_start_is_tokenized(
    load: Any,
    limit: str,
    line: dict[str, Any],
    chat: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    tokenize = PreTrainedTokenizerFast.__call__

    def counting(self: Any, text: Any, **options: Any) -> Any:
        sizes.extend(map(len, [text] if isinstance(text, str) else text))
        return tokenize(self, text, **options)

    tok = tiny.tokenizer()
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counting)
    others = [{**line, "prompt": text} for text in ("q", "r")]
    path = put(tmp_path / "a.jsonl", [*others, {**line, "prompt": "q" * 1_000_000}])
    section = DataSection(train=path, chat=chat, too_long="skip", **{limit: 100})
    made = load(section, path, tok)
    assert max(sizes) == reading.SHORTEST_START
    assert made.report.counts == {"read": 3, "kept": 2, "truncated": 0, "bad": 0, "too_long": 1}
    assert len(made) == 2
    with pytest.raises(
        DataError, match=rf"a\.jsonl:3: .*4096 of its 1\d{{6}} .*the limit is 100 \(data\.{limit}\)"
    ):
        load(section.model_copy(update={"too_long": "error"}), path, tok)


def test_a_text_of_few_long_tokens_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length says nothing: only the tokens count, also where they are found start by start."""
    monkeypatch.setattr(reading, "SPARSE", 2)
    monkeypatch.setattr(reading, "SHORTEST_START", 8)
    path = put(
        tmp_path / "a.jsonl", [{"prompt": "<|im_start|>" * 10}, {"prompt": "<|im_start|>" * 11}]
    )
    (task,) = tasks(path, tiny.tokenizer(None), max_prompt_tokens=10, too_long="skip").items
    assert task.prompt_ids == (3,) * 10


def test_truncating_a_conversation_keeps_the_template_whole(tmp_path: Path) -> None:
    tok = tiny.tokenizer()
    path = put(tmp_path / "a.jsonl", [{"prompt": "0123456789🙂🙂"}])
    empty = len(
        tok.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)[
            "input_ids"
        ]
    )
    for side, kept in (("truncate_left", "89🙂🙂"), ("truncate_right", "0123456789")):
        (task,) = tasks(path, tok, max_prompt_tokens=empty + 10, too_long=side).items
        assert (
            tok.decode(task.prompt_ids)
            == f"<|im_start|>user\n{kept}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert task.prompt == kept
    with pytest.raises(DataError, match="shortening its last user message does not make it fit"):
        tasks(path, tok, max_prompt_tokens=empty - 1, too_long="truncate_left")


def test_a_sample_over_the_limit(tmp_path: Path) -> None:
    tok = with_bos(tiny.tokenizer(None))
    path = put(tmp_path / "a.jsonl", [{"prompt": "0123", "completion": "456"}])
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: 9 tokens, the limit is 6 \(data\.max_tokens\)"
    ):
        samples(path, tok, max_tokens=6)
    left = samples(path, tok, max_tokens=6, too_long="truncate_left")
    assert learned(tok, left.items[0]) == ("<bos>3456<eos>", "456<eos>")
    right = samples(path, tok, max_tokens=6, too_long="truncate_right")
    assert learned(tok, right.items[0]) == ("<bos>01234", "4")
    with pytest.raises(DataError, match="nothing is left to learn"):
        samples(path, tok, max_tokens=5, too_long="truncate_right")


def test_text_is_learned_whole_and_ends_with_eos(tmp_path: Path) -> None:
    tok = tiny.tokenizer()
    path = put(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "abc<eos>"}])
    first, second = samples(path, tok).items
    assert learned(tok, first) == learned(tok, second) == ("abc<eos>", "bc<eos>")
    (bos, _) = samples(path, with_bos(tok)).items
    assert learned(tok, bos) == ("<bos>abc<eos>", "abc<eos>")


def test_completions_are_learned_with_eos_or_the_end_of_turn(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", SUMS[:3])
    tok = tiny.tokenizer(None)
    assert learned(tok, samples(path, tok).items[2]) == ("2+2?4<eos>", "4<eos>")
    assert learned(tok, samples(path, tok, loss_on="all").items[2]) == ("2+2?4<eos>", "+2?4<eos>")
    chat = tiny.tokenizer()
    whole, part = learned(chat, samples(path, chat, system_prompt="be").items[2])
    assert part == "4<|im_end|>"
    assert whole.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>")


@pytest.mark.parametrize("kind", kit.KINDS)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("A: ", "4"), ("A:", " 4"), ("A:\n", "\n4"), ("A", "B\n"), ("é ", "🙂")],
)
def test_the_prompt_of_a_plain_completion_is_tokenized_as_in_rl(
    tmp_path: Path, kind: str, prompt: str, completion: str
) -> None:
    tok = kit.KINDS[kind]()
    row = {"prompt": prompt, "completion": completion}
    (task,) = tasks(put(tmp_path / "a.jsonl", [row]), tok).items
    (sample,) = samples(put(tmp_path / "a.jsonl", [row]), tok).items
    assert sample.token_ids[: len(task.prompt_ids)] == list(task.prompt_ids)
    assert sample.loss_mask.index(True) == len(task.prompt_ids)
    assert (
        tok.decode(sample.token_ids, clean_up_tokenization_spaces=False)
        == prompt + completion + "</s>"
    )


def test_loss_on_in_conversations(tmp_path: Path) -> None:
    tok = tiny.tokenizer()
    ask, say = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"))
    )
    last = {"role": "assistant", "content": "b"}
    talk = put(tmp_path / "a.jsonl", [{"messages": [ask, say, ask, last]}])
    both = "a<|im_end|>b<|im_end|>"
    final = "b<|im_end|>"
    assert learned(tok, samples(talk, tok).items[0])[1] == both
    assert learned(tok, samples(talk, tok, loss_on="completion").items[0])[1] == final
    whole, part = learned(tok, samples(talk, tok, loss_on="all").items[0])
    assert whole == "<|im_start|>" + part
    pair = put(tmp_path / "b.jsonl", [{"prompt": [ask, say, ask], "completion": [last]}])
    assert learned(tok, samples(pair, tok).items[0])[1] == final
    assert learned(tok, samples(pair, tok, loss_on="assistant").items[0])[1] == both


def test_a_message_of_weight_0_is_not_learned(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]

    def line(**weights: Any) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        for text, weight in weights.items():
            next(m for m in messages if m["content"] == text)["weight"] = weight
        return put(tmp_path / "w.jsonl", [{"messages": messages}])

    for weights, texts in (
        ({"b": 0}, "d"),
        ({"d": 0}, "b"),
        ({"b": 1, "d": 1.0}, "bd"),
        ({"a": 0}, "bd"),
    ):
        (sample,) = samples(line(**weights), tokenizer).items
        said = learned(tokenizer, sample)[1]
        assert [t for t in "abcd" if t in said.replace("<|im_end|>", "")] == list(texts)
    with pytest.raises(DataError, match=r"w.jsonl:1: no assistant turn"):
        samples(line(b=0, d=0), tokenizer)
    with pytest.raises(DataError, match=r"messages\[1\] has weight 0.5"):
        samples(line(b=0.5), tokenizer)
    with pytest.raises(DataError, match=r"weight 0.*loss_on"):
        samples(line(b=0), tokenizer, loss_on="all")


def test_a_stripped_conversation_becomes_several_samples_and_says_so(tmp_path: Path) -> None:
    tok = kit.byte_level(kit.template("qwen3"))
    talk = [
        {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "qasb", strict=True)
    ]
    made = samples(put(tmp_path / "a.jsonl", [{"messages": talk}]), tok)
    assert [learned(tok, s)[1] for s in made.items] == [
        f"<think>\n\n</think>\n\n{c}<|im_end|>" for c in "ab"
    ]
    assert "1 conversations became several samples" in made.report.summary()
    assert made.report.counts["kept"] == 1


def test_only_the_sample_of_a_conversation_that_is_far_too_long_is_skipped(tmp_path: Path) -> None:
    tok = kit.byte_level(kit.template("qwen3"))
    texts = ["q", "a", "s" * 5000, "b"]
    talk = [
        {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, texts, strict=True)
    ]
    path = put(tmp_path / "a.jsonl", [{"messages": talk}])
    (sample,) = samples(path, tok, max_tokens=100, too_long="skip").items
    assert "a<|im_end|>" in learned(tok, sample)[1]
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*100 \(data.max_tokens\).*truncate_right"):
        samples(path, tok, max_tokens=100)


def test_a_conversation_without_an_assistant_turn_is_a_bad_line(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: no assistant turn to learn"):
        samples(path, tiny.tokenizer())


def test_a_template_that_cannot_be_masked_is_refused_with_the_line(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template renders"):
        samples(path, kit.byte_level(kit.template("deepseek_r1")))


def test_templates_that_teach_no_stop_are_noted(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}])
    report = samples(path, kit.byte_level(kit.template("plain_roles"))).report
    assert "does not learn to stop" in report.summary()
    source = kit.template("smollm3_marked").replace(
        "{{ message.content + '<|im_end|>' }}{%- endgeneration -%}",
        "{{ message.content }}{%- endgeneration -%}{{ '<|im_end|>' }}",
    )
    assert "leave <|im_end|> out" in samples(path, kit.byte_level(source)).report.summary()
    assert not samples(path, kit.byte_level(kit.template("smollm3_marked"))).report.notes


def test_settings_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    text = put(tmp_path / "b.jsonl", [{"text": "x"}])
    tok = tiny.tokenizer()
    for settings in (
        {"completion": "answer"},
        {"loss_on": "all"},
        {"max_tokens": 5},
        {"too_long": "skip"},
    ):
        with pytest.raises(ConfigError, match=f"data.{next(iter(settings))}"):
            tasks(path, tok, **settings)
    for settings in ({"max_prompt_tokens": 5}, {"too_long": "skip"}):
        with pytest.raises(ConfigError, match=f"data.{next(iter(settings))}"):
            samples(path, tok, **settings)
    with pytest.raises(ConfigError, match=r"data\.eval weighs 'b'") as refused:
        tasks(path, tok, eval=["a", {"path": "b", "weight": 2}])
    assert refused.value.problems[0].keys == ("data.eval",)
    for settings in ({"chat": True}, {"system_prompt": "x"}, {"loss_on": "completion"}):
        with pytest.raises(ConfigError, match=f"data.{next(iter(settings))}"):
            samples(text, tok, **settings)


def test_sources_without_weights_are_joined_and_with_weights_mixed(tmp_path: Path) -> None:
    a = put(tmp_path / "a.jsonl", SUMS)
    b = put(tmp_path / "b.jsonl", SUMS[:2])
    joined = tasks((a, b), tiny.tokenizer())
    assert [len(part) for part in joined.parts] == [8]
    mixed = tasks(({"path": a, "weight": 1}, {"path": b, "weight": 3}), tiny.tokenizer())
    assert [(p.name, p.start, p.stop, p.weight) for p in mixed.parts] == [
        (a, 0, 6, 1),
        (b, 6, 8, 3),
    ]
    assert f"{b}: 75% of the draws, 2 items" in mixed.report.notes
    with pytest.raises(ConfigError, match=f"'{b}' has no weight"):
        tasks(({"path": a, "weight": 1}, b), tiny.tokenizer())


def test_the_fingerprint_sees_every_column(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    before = tasks(path, tiny.tokenizer()).fingerprint
    assert tasks(path, tiny.tokenizer()).fingerprint == before
    (tmp_path / "moved").mkdir()
    assert tasks(put(tmp_path / "moved" / "b.jsonl", SUMS), tiny.tokenizer()).fingerprint == before
    put(tmp_path / "a.jsonl", [*SUMS[:-1], {**SUMS[-1], "answer": "0"}])
    assert tasks(path, tiny.tokenizer()).fingerprint != before


@pytest.mark.more
def test_peek_says_the_format_and_refuses_early_without_a_tokenizer(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    section = DataSection(train=path)
    [(told, first)] = peek(section, path, "sft")
    assert (
        told == f"{path}: prompts in 'question', completions in 'answer'"
        and first.where == f"{path}:1"
    )
    code = (
        "import sys\n"
        "from tunesmith.config.schema import DataSection\n"
        "from tunesmith.learn.data.prepare import peek\n"
        f"peek(DataSection(train={path!r}), {path!r}, 'rl')\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


MAP = """
import json
def chat(row):
    return {"prompt": row["question"] + " Think.", "answer": row["answer"].zfill(3)}
def odd(row):
    return row if row["level"] % 2 else None
def adds(row):
    row["question"] += "!"
    return row
def breaks(row):
    return {"prompt": row["question"], "level": 1 / (row["level"] - 3)}
def exits(row):
    raise SystemExit(1)
def lists(row):
    return [row]
def two(a, b):
    return a
async def later(row):
    return row
def every(row):
    yield row
def none(row):
    return None
"""


@pytest.fixture
def prep(tmp_path: Path) -> str:
    (tmp_path / "prep.py").write_text(MAP)
    return str(tmp_path / "prep.py")


def test_rows_are_mapped_before_their_format_is_detected(tmp_path: Path, prep: str) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    tok = tiny.tokenizer()
    task = tasks(path, tok, map=f"{prep}:chat").items[2]
    assert task.prompt == "2+2? Think." and task.id == f"{path}:3"
    assert task.columns == {"question": "2+2?", "answer": "004", "level": 2}, (
        "the other columns stay"
    )
    made = tasks(path, tok, map=f"{prep}:odd")
    assert [t.columns["level"] for t in made.items] == [1, 3, 5]
    assert made.report.counts["read"] == 6 and any("3 rows" in note for note in made.report.notes)
    assert made.report.counts["kept"] == 3 and "3 of 6 lines used" in made.report.summary()
    assert made.fingerprint != tasks(path, tok).fingerprint
    sample = samples(path, tok, map=f"{prep}:adds").items[0]
    assert "0+0?!" in tok.decode(sample.token_ids)


@pytest.mark.parametrize(
    ("name", "line", "word"),
    [
        ("breaks", 4, "ZeroDivisionError"),
        ("exits", 1, "SystemExit"),
        ("lists", 1, "list"),
        ("none", 0, ""),
    ],
)
def test_a_row_that_cannot_be_mapped_is_a_bad_line(
    tmp_path: Path, prep: str, name: str, line: int, word: str
) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    tok = tiny.tokenizer()
    with pytest.raises(DataError) as caught:
        tasks(path, tok, map=f"{prep}:{name}")
    assert (f"{path}:{line}: " if line else path) in str(caught.value) and word in str(caught.value)
    if name == "breaks":
        assert f"{prep}, line 11" in str(caught.value)
        assert tasks(path, tok, map=f"{prep}:breaks", skip_bad=True).report.counts["bad"] == 1


@pytest.mark.parametrize("name", ["two", "later", "every", "missing"])
def test_a_function_that_maps_no_row_is_refused(tmp_path: Path, prep: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        tasks(put(tmp_path / "a.jsonl", SUMS), tiny.tokenizer(), map=f"{prep}:{name}")


def test_peek_does_not_run_the_function(tmp_path: Path, prep: str) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    section = DataSection(train=path, map=f"{prep}:exits")
    assert peek(section, path, "rl") == [(f"{path}: its rows go through {prep}:exits", None)]


@pytest.mark.parametrize(
    ("split", "levels"),
    [
        ("train[:2]", [0, 1]),
        ("train[4:]", [4, 5]),
        ("train[-2:]", [4, 5]),
        ("train[:-4]", [0, 1]),
        ("train[:50%]", [0, 1, 2]),
        ("train[50%:]", [3, 4, 5]),
        ("train[2:4]", [2, 3]),
        ("train[ : 33.4% ]", [0, 1]),
        ("train", [0, 1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("kind", ["file", "directory", "saved"])
def test_a_part_of_a_split(tmp_path: Path, kind: str, split: str, levels: list[int]) -> None:
    path = tmp_path / "rows"
    if kind == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(SUMS).save_to_disk(str(path))
    elif kind == "directory":
        path.mkdir()
        put(path / "train.jsonl", SUMS)
    else:
        path = Path(put(tmp_path / "rows.jsonl", SUMS))
    made = tasks({"path": str(path), "split": split}, tiny.tokenizer())
    assert [task.columns["level"] for task in made.items] == levels
    assert made.items[0].id.endswith(f":{levels[0] + 1}"), "a row keeps its number"


def test_a_part_without_rows_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", SUMS)
    with pytest.raises(DataError):
        tasks({"path": path, "split": "train[6:]"}, tiny.tokenizer())
    for no_part in ("train[_:]", "train[1__0:]", "train[:1.2.3%]", "train[:.%]"):
        with pytest.raises(ConfigError, match="no split"):
            tasks({"path": path, "split": no_part}, tiny.tokenizer())


def test_a_prompt_of_which_the_tokenizer_knows_nothing_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    letters = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tok = PreTrainedTokenizerFast(tokenizer_object=letters)
    path = put(tmp_path / "a.jsonl", [{"prompt": "ab"}, {"prompt": "xyz"}])
    with pytest.raises(DataError, match=r"a\.jsonl:2.*no token"):
        tasks(path, tok)
    assert [task.prompt_ids for task in tasks(path, tok, skip_bad=True).items] == [(0, 1)]


def test_tools_that_plain_text_has_no_place_for_are_refused(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked = {"prompt": "1+1?", "tools": [tool]}
    answered = put(tmp_path / "answers.jsonl", [{**asked, "completion": "2"}])
    pairs = put(tmp_path / "pairs.jsonl", [{**asked, "chosen": "2", "rejected": "3"}])
    for chat, key in ((False, "data.chat"), (None, "model.chat_template")):
        both = DataSection(train=pairs, chat=chat)
        for load in (
            partial(tasks, answered, chat=chat),
            partial(samples, answered, chat=chat),
            partial(load_pairs, both, both.train),
        ):
            with pytest.raises(ConfigError, match="has tools") as caught:
                load(kit.byte_level())
            assert caught.value.keys == (key,)


def test_tasks_keep_the_tools_that_their_prompts_describe(tmp_path: Path) -> None:
    """The environment's, otherwise the line's own, also as JSON text."""
    own, played = (
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("add", "look")
    )
    rows = [{"prompt": "a"}, {"prompt": "b", "tools": json.dumps([own])}, {"prompt": "c"}]
    section = DataSection(train=put(tmp_path / "a.jsonl", rows))
    tokenizer = kit.byte_level(kit.template("hermes"))
    loaded = load_tasks(
        section,
        section.train,
        tokenizer,
        lambda example: [played] if example.prompt == "a" else None,
    )
    assert [task.tools for task in loaded.items] == [[played], [own], None]
    shown = [tokenizer.decode(task.prompt_ids) for task in loaded.items]
    assert ["look" in text for text in shown] == [True, False, False]
    assert ["add" in text for text in shown] == [False, True, False]
