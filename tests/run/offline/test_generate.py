"""Batch inference: order, resuming, what is made of the completions, and equality with one at a
time."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tunesmith
from tests.support import tiny
from tests.support.fake_engine import FakeEngine, numbers
from tests.support.tiny_rewards import direct_scores, save_reward_model
from tests.support.tiny_runs import REWARDS, sums, write_lines
from tunesmith.cli.main import app
from tunesmith.config.schema import LoraSection
from tunesmith.errors import (
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    StorageError,
    UserError,
)
from tunesmith.learn.environments.base import SingleTurn
from tunesmith.learn.usercode.jail import missing
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.records.interrupts import Interrupted, handled
from tunesmith.records.standing import recorded
from tunesmith.records.toml import toml_value
from tunesmith.run.assembly.checking import resumes
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.run.offline.answering import answer
from tunesmith.run.offline.generate import Generated, run_generate
from tunesmith.run.offline.lines import (
    CONTENTS,
    LineWriter,
    claim,
    read_lines,
    repair,
    unfinished_file,
)
from tunesmith.run.offline.scoring import given_records
from tunesmith.run.offline.selection import OVERWRITTEN
from tunesmith.run.offline.unfinished import Unfinished
from tunesmith.run.offline.usage import read_report, seconds_of
from tunesmith.run.offline.watch import JobWatch
from tunesmith.types import Completion, Rollout, RolloutGroup, Sampling, Task

CONFINED = pytest.mark.skipif(bool(missing()), reason=missing() or "it can")


def generate(folder: Path, model: Path, *overrides: str, **sections: dict[str, Any]) -> Generated:
    """A run in ``folder`` on 30 sums, with a reward, 3 samples of 6 tokens each."""
    if not (folder / "in.jsonl").exists():
        folder.mkdir(exist_ok=True)
        write_lines(
            folder / "in.jsonl", [{"question": s["prompt"], "gold": s["answer"]} for s in sums(30)]
        )
        (folder / "rewards.py").write_text(REWARDS)
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "in.jsonl"), "chat": False},
        "sampling": {"n": 3, "max_new_tokens": 6},
        "reward": {"functions": [f"{folder / 'rewards.py'}:share"], "isolation": "thread"},
        "system": {"threads": 1},
        **sections,
    }
    said = [
        f"{section}.{key}={toml_value(value)}"
        for section, keys in settings.items()
        for key, value in keys.items()
    ]
    return run_generate(None, [f"run_dir={folder / 'out'}", *said, *overrides])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


@given(st.lists(st.text(max_size=8), max_size=5), st.integers(0, 200))
def test_a_file_cut_anywhere_is_mended_to_its_whole_lines(texts: list[str], cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        whole = [json.dumps({"t": text}).encode() + b"\n" for text in texts]
        path.write_bytes(b"".join(whole)[:cut])
        kept = repair(path)
        assert path.read_bytes() == b"".join(whole[:kept])
        assert kept == len(whole) or len(b"".join(whole[: kept + 1])) > cut


def test_a_last_line_without_its_content_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"\0" * 7 + b"\n")
    assert repair(path) == 1
    assert path.read_bytes() == b'{"a": 1}\n'
    assert repair(tmp_path / "none.jsonl") == 0


def test_a_damaged_line_in_the_middle_is_told_and_nothing_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 3}\n')
    with pytest.raises(DataError, match=r"lines\.jsonl, line 2"):
        repair(path)
    assert path.read_bytes() == b'{"a": 1}\n\n{"a": 3}\n'


def tasks_of(count: int) -> list[Task]:
    return [Task(f"t{i}", f"p{i}", (5, i + 6), {"row": i}) for i in range(count)]


def answered(
    path: Path, tasks: Sequence[Task], engine: Any, window: int, n: int = 2
) -> list[dict[str, Any]]:
    collector = Collector(engine.generate, None, {"single_turn": SingleTurn()}, numbers, 60.0)
    writer = LineWriter(numbers, flat=False, scored=False, logprobs=True)

    async def produce(place: int, task: Task, unfinished: Unfinished) -> RolloutGroup:
        alone = replace(collector, complete=unfinished.completing(place, engine.generate))
        return (await alone.collect([task], Sampling(5), n, derive_seed(0, place)))[0]

    watch = JobWatch(path.parent, "completions", len(tasks), samples=n, live=False)
    answer(path, tasks, produce, writer.line, window=window, max_failed_share=0.1, watch=watch)
    return lines_of(path)


def test_lines_come_in_order_whatever_is_in_flight_and_wherever_it_was_cut(tmp_path: Path) -> None:
    tasks = tasks_of(80)
    lines = answered(tmp_path / "a.jsonl", tasks, FakeEngine(), window=7)
    assert [line["row"] for line in lines] == list(range(80))
    assert [line["prompt"] for line in lines[:2]] == ["p0", "p1"]
    first = lines[0]["completions"][0]
    assert len(first["token_ids"]) == len(first["logprobs"]) == first["tokens"]
    whole = (tmp_path / "a.jsonl").read_bytes()
    for cut in (0, 1, len(whole) // 3, len(whole) - 1):
        (tmp_path / "b.jsonl").write_bytes(whole[:cut])
        answered(tmp_path / "b.jsonl", tasks, FakeEngine(), window=50)
        assert (tmp_path / "b.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("finished", "interrupted"),
    [(0, True), (1, True), (37, True), (158, True), (0, False), (1, False), (37, False)],
)
def test_no_finished_completion_is_sampled_again(
    tmp_path: Path, finished: int, interrupted: bool
) -> None:
    """Completions finish in another order than that of the data, and the run ends after some of
    them."""
    calls: list[int | None] = []

    class Ending(FakeEngine):
        most = 10**6

        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            completion = await super().generate(prompt_ids, sampling)
            for _ in range((sampling.seed or 0) % 7):
                await asyncio.sleep(0)
            if len(calls) >= self.most and not interrupted:
                raise EngineError("out")
            if len(calls) == self.most:
                signal.raise_signal(signal.SIGTERM)
            calls.append(sampling.seed)
            return completion

    tasks = tasks_of(80)
    engine = Ending()
    answered(tmp_path / "straight.jsonl", tasks, engine, window=7)
    calls.clear()
    engine.most = finished
    out = tmp_path / "cut.jsonl"
    with pytest.raises((Interrupted, RewardError)) as caught, handled():
        answered(out, tasks, engine, window=7)
    assert "of 80 lines" in "".join(caught.value.__notes__)
    engine.most = 10**6
    answered(out, tasks, engine, window=7)
    assert out.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    assert len(calls) == len(set(calls)) == 160
    assert {p.name for p in tmp_path.iterdir() if "unfinished" in p.name} == set()


def test_lines_whose_turn_has_come_are_written_first(tmp_path: Path) -> None:
    """A kill, or a full disk, between the writes of two lines leaves them to the next call."""
    tasks = tasks_of(12)
    answered(tmp_path / "a.jsonl", tasks, FakeEngine(), window=7)
    texts = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    out = tmp_path / "b.jsonl"
    out.write_text("".join(texts[:3]))
    finished = [{"place": place, "line": json.loads(texts[place])} for place in range(3, 9)]
    write_lines(unfinished_file(out), finished)
    answered(out, tasks, FakeEngine(), window=7)
    assert out.read_text() == "".join(texts)


def test_the_file_of_unfinished_work_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.run.offline.unfinished.LEAST_BYTES", 4000)
    out = tmp_path / "a.jsonl"
    sizes = list[int]()

    class Looking(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            sizes.append(unfinished_file(out).stat().st_size)
            return await super().generate(prompt_ids, sampling)

    answered(out, tasks_of(200), Looking(), window=3)
    assert max(sizes) < 10_000 < out.stat().st_size


def test_no_more_than_the_window_is_in_flight(tmp_path: Path) -> None:
    engine = FakeEngine()
    answered(tmp_path / "a.jsonl", tasks_of(40), engine, window=3)
    assert engine.stats().peak_running <= 3 * 2


def test_too_many_failures_stop_the_run_before_their_lines_are_written(tmp_path: Path) -> None:
    class Failing(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            if prompt_ids[1] > 50:
                raise ValueError("no")
            return await super().generate(prompt_ids, sampling)

    with pytest.raises(RewardError, match="failed"):
        answered(tmp_path / "a.jsonl", tasks_of(80), Failing(), window=7)
    assert [line["row"] for line in lines_of(tmp_path / "a.jsonl")] == list(range(45))


def test_a_short_last_block_is_judged_with_what_was_written_before_it(tmp_path: Path) -> None:
    class Failing(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            if prompt_ids[1] >= first:
                raise ValueError("no")
            return await super().generate(prompt_ids, sampling)

    tasks = tasks_of(65)
    first = 70
    assert "error" in answered(tmp_path / "a.jsonl", tasks, Failing(), 7, n=1)[-1]["completions"][0]
    tasks = tasks_of(80)
    first = 79
    with pytest.raises(RewardError, match="7 of 64 rollouts failed"):
        answered(tmp_path / "b.jsonl", tasks, Failing(), 7, n=1)
    assert len(lines_of(tmp_path / "b.jsonl")) == 73


def test_data_that_the_output_would_write_over_is_refused() -> None:
    task = Task("t", "p", (5,), {"reward": 1})
    with pytest.raises(DataError, match="column 'reward'"):
        LineWriter(numbers, flat=True, scored=True).check_columns([task])
    LineWriter(numbers, flat=False, scored=True).check_columns([task])
    with pytest.raises(DataError, match="column 'reward'"):
        LineWriter(numbers, flat=False, scored=True, overwritten=OVERWRITTEN["best"]).check_columns(
            [task]
        )
    judged = Task("t", "p", (5,), {"chosen": "x"})
    LineWriter(
        numbers, flat=False, scored=True, overwritten=OVERWRITTEN["conditional"]
    ).check_columns([judged])
    with pytest.raises(DataError, match="column 'chosen'"):
        LineWriter(
            numbers, flat=False, scored=True, overwritten=OVERWRITTEN["pairs"]
        ).check_columns([judged])


@pytest.mark.parametrize("value", [None, [], [1], 5, [{"role": "user", "content": "x"}]])
def test_lines_without_a_completion_to_score_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match="no completion to score"):
        given_records(Task("t", "p", (5,), {"completion": value}), None)


def test_completions_to_score_may_be_json_text() -> None:
    """As CSV files have them; one completion may itself be JSON."""
    cut = {"completion": "4", "finish_reason": "length"}
    turn = {"role": "assistant", "content": "4"}
    for name, value, expected in (
        ("completions", ["four", "five"], [{"completion": "four"}, {"completion": "five"}]),
        ("completions", [cut], [cut]),
        ("completion", [turn], [{"completion": "4"}]),
        ("completion", ["four"], [{"completion": '["four"]'}]),
        ("completion", [1, 2], [{"completion": "[1, 2]"}]),
    ):
        task = Task("t", "p", (5,), {name: json.dumps(value)})
        assert given_records(task, None) == expected
    flat = Task("t", "p", (5,), {"completion": "4", "finish_reason": "length"})
    assert given_records(flat, None) == [cut]


def test_columns_and_order_are_kept_and_a_second_run_changes_nothing(
    tmp_path: Path, model: Path
) -> None:
    done = generate(tmp_path, model)
    lines = lines_of(done.output)
    assert [line["gold"] for line in lines] == [s["answer"] for s in sums(30)]
    assert all(len(line["completions"]) == 3 for line in lines)
    assert done.lines == 30 and done.counts["scored"] == 90
    checked = CliRunner().invoke(app, ["check", str(done.output.parent)])
    assert checked.exit_code != 0 and "without checkpoints" in checked.output
    before = done.output.read_bytes()
    done.output.write_bytes(before[: len(before) // 2])
    assert generate(tmp_path, model).output.read_bytes() == before
    with pytest.raises(ConfigError, match=r"sampling\.seed = 0.*now 1"):
        generate(tmp_path, model, "sampling.seed=1")
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float32'.*now 'bfloat16'"):
        generate(tmp_path, model, "model.dtype=bfloat16")
    (tmp_path / "other.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(ConfigError, match="begun with chat template"):
        generate(tmp_path, model, f"model.chat_template={tmp_path / 'other.jinja'}")
    assert done.output.read_bytes() == before


def test_a_report_says_what_all_calls_took_also_of_one_that_failed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConfigError("no")

    report = tmp_path / "out" / "report.json"
    with monkeypatch.context() as patched, pytest.raises(ConfigError):
        patched.setattr("tunesmith.run.offline.generate._selected", fail)
        generate(tmp_path, model)
    first = json.loads(report.read_text())
    assert list(first) == ["usage"] and first["usage"]["seconds/sampling"] > 0
    done = generate(tmp_path, model, "output.kind=best")
    found = json.loads(report.read_text())
    assert found["usage"] == done.usage and found["output"] == "best.jsonl" and found["lines"] == 30
    assert set(seconds_of(done.usage)) == {"sampling", "selection", "setup"}
    assert done.usage["seconds/sampling"] >= first["usage"]["seconds/sampling"]
    assert done.earlier == pytest.approx(sum(seconds_of(first["usage"]).values()))
    assert (
        done.usage["kv_peak"] > 0
        and 0 < done.usage["kv_used"] <= 1
        and done.usage["memory/host_peak"] > 0
    )


@pytest.mark.more
def test_best_pairs_and_conditional_are_made_of_the_same_completions(
    tmp_path: Path, model: Path
) -> None:
    lines = lines_of(generate(tmp_path, model).output)
    rewards = [[r["reward"] for r in line["completions"]] for line in lines]
    best = lines_of(generate(tmp_path, model, "output.kind=best").output)
    assert [line["reward"] for line in best] == [max(r) for r in rewards]
    done = generate(tmp_path, model, "output.kind=pairs")
    pairs = lines_of(done.output)
    assert [line["chosen_reward"] for line in pairs] == [max(r) for r in rewards if max(r) > min(r)]
    assert done.lines + done.counts.get("tied", 0) == 30
    told = lines_of(
        generate(tmp_path, model, "output.kind=conditional", "output.reward_levels=3").output
    )
    assert len(told) == 90 and {line["prompt"].split(": ")[1] for line in told} == {
        "1 ",
        "2 ",
        "3 ",
    }


def test_scoring_gives_the_rewards_that_generating_gave(tmp_path: Path, model: Path) -> None:
    made = lines_of(generate(tmp_path, model).output)
    bare = [
        {**line, "completions": [{"completion": r["completion"]} for r in line["completions"]]}
        for line in made
    ]
    write_lines(tmp_path / "given.jsonl", bare)
    data = {"train": str(tmp_path / "given.jsonl"), "chat": False}
    scored = lines_of(generate(tmp_path, model, "output.kind=score", data=data, sampling={}).output)
    assert [[r["reward"] for r in line["completions"]] for line in scored] == [
        [r["reward"] for r in line["completions"]] for line in made
    ]
    flat = [
        {"prompt": line["prompt"], "completion": line["completions"][0]["completion"]}
        for line in made
    ]
    write_lines(tmp_path / "flat.jsonl", flat)
    data = {"train": str(tmp_path / "flat.jsonl"), "chat": False}
    (tmp_path / "out" / "scores.jsonl").unlink()
    scored = lines_of(generate(tmp_path, model, "output.kind=score", data=data, sampling={}).output)
    assert [line["reward"] for line in scored] == [
        line["completions"][0]["reward"] for line in made
    ]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.more
def test_a_reward_model_scores_given_answers_as_transformers_does(
    tmp_path: Path, model: Path, chat: bool
) -> None:
    """On the prompt as it is asked, the answer, and what ends one."""
    judge = save_reward_model(tmp_path / "judge")
    given_lines = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "what", "completion": "ever and ever"},
        {"prompt": "what", "completion": "ever and ev", "finish_reason": "length"},
    ]
    write_lines(tmp_path / "given.jsonl", given_lines)
    reward = {"models": [{"path": str(judge)}]}
    settings = [
        f"run_dir={tmp_path / 'out'}",
        f"model.path={model}",
        "model.dtype=float32",
        "output.kind=score",
        f"data.train={tmp_path / 'given.jsonl'}",
        f"data.chat={str(chat).lower()}",
        "system.threads=1",
        f"reward.models=[{{path={json.dumps(str(judge))}}}]",
    ]
    lines = lines_of(run_generate(None, settings).output)
    tokens = tiny.tokenizer()
    whole = []
    for line in given_lines:
        asked = (
            f"<|im_start|>user\n{line['prompt']}<|im_end|>\n<|im_start|>assistant\n"
            if chat
            else line["prompt"]
        )
        end = "" if "finish_reason" in line else "<|im_end|>" if chat else "<eos>"
        whole.append(tokens(asked + line["completion"] + end).input_ids)
    assert [line["reward"] for line in lines] == pytest.approx(
        direct_scores(judge, whole), abs=1e-4
    )
    best = lines_of(generate(tmp_path / "best", model, "output.kind=best", reward=reward).output)
    assert len(best) == 30 and all("reward_model" in line["rewards"] for line in best)


def test_one_greedy_completion_stands_flat_and_needs_no_reward(tmp_path: Path, model: Path) -> None:
    write_lines(tmp_path / "in.jsonl", sums(5))
    settings = [
        f"run_dir={tmp_path / 'out'}", f"model.path={model}", f"data.train={tmp_path / 'in.jsonl'}",
        "data.chat=false", "sampling.max_new_tokens=4", "system.threads=1",
    ]  # fmt: skip
    lines = lines_of(run_generate(None, settings).output)
    assert [set(line) for line in lines] == [
        {"prompt", "answer", "completion", "finish_reason", "tokens"}
    ] * 5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_an_adapter_answers_wherever_the_engine_is(way: str, tmp_path: Path, model: Path) -> None:
    torch.manual_seed(0)
    adapted = CausalLM.load(model)
    attach(adapted, LoraSection(rank=4))
    with torch.no_grad():
        for name, weight in adapted.module.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    adapted.save(tmp_path / "adapter")
    write_lines(tmp_path / "in.jsonl", sums(4))

    def completions(run: str, *more: str) -> list[Any]:
        settings = [
            f"run_dir={tmp_path / run}",
            f"model.path={model}",
            "model.dtype=float32",
            "data.chat=false",
            f"data.train={tmp_path / 'in.jsonl'}",
            "sampling.max_new_tokens=6",
            "system.threads=1",
            *more,
        ]
        return [line["completion"] for line in lines_of(run_generate(None, settings).output)]

    lora = f"lora.path={tmp_path / 'adapter'}"
    apart = "system.engine_process=true"
    here = completions("here", lora)
    assert here != completions("base")
    assert completions(way, lora, apart, f"system.adapter_sync={way}") == here


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=1e-3"], "train.lr has no effect"),
        (["system.gradient_checkpointing=true"], "system.gradient_checkpointing has no effect"),
        (["system.logprob_chunk=64"], "system.logprob_chunk has no effect"),
        (["eval.every=3"], "eval.every"),
        (["sampling.temperature=0"], "greedy, and all 3 completions would be equal"),
        (["output.kind=best", "sampling.n=1"], "set sampling.n, such as 4"),
        (["output.min_margin=1"], "output.min_margin has no effect"),
        (["output.kind=conditional", "output.reward_template=x"], "both {prompt} and {reward}"),
        (["output.kind=pears"], "Did you mean 'pairs'?"),
        (["rollout.group_size=3"], "is called [sampling] here"),
        (["sampling.max_new_tokens=600"], "leaves no room in the model's context of 512"),
        (["data.completion=gold"], "data.completion has no effect"),
    ],
)
def test_what_would_be_ignored_or_cannot_work_is_refused(
    tmp_path: Path, model: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(tmp_path, model, *overrides)
    assert message in str(caught.value)
    assert not (tmp_path / "out" / "completions.jsonl").exists()


def test_an_unread_reward_kind_without_a_reward_is_refused(tmp_path: Path, model: Path) -> None:
    settings = [
        f"model.path={model}",
        "data.train=org/x",
        "output.kind=pairs",
        "sampling.n=2",
        f"run_dir={tmp_path}",
    ]
    with pytest.raises(ConfigError, match="needs a reward"):
        run_generate(None, settings)


PROMPTS = ["7*6=", "a longer prompt than the first: 12+30=", "x", "1+1="]


def test_equal_to_unbatched_greedy_of_transformers(model: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = CausalLM.load(model)
    made = tunesmith.generate(loaded, PROMPTS, max_new_tokens=12, chat=False, max_prefill_tokens=16)
    for prompt, ours in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert ours.token_ids == [out[0, ids.shape[1] :].tolist()]
        assert ours.text == tokenizer.decode(ours.token_ids[0], skip_special_tokens=True)
        alone = tunesmith.generate(loaded, [prompt], max_new_tokens=12, chat=False)[0]
        assert alone.token_ids == ours.token_ids
        assert torch.tensor(alone.logprobs).allclose(torch.tensor(ours.logprobs), atol=1e-4)


def test_samples_depend_on_seed_and_place_and_templates_are_applied(model: Path) -> None:
    loaded = CausalLM.load(model)
    settings: dict[str, Any] = {"n": 3, "max_new_tokens": 6, "chat": False}
    first, again = (tunesmith.generate(loaded, PROMPTS, **settings, seed=5) for _ in range(2))
    assert [g.token_ids for g in first] == [g.token_ids for g in again]
    assert (
        first[0].token_ids != tunesmith.generate(loaded, PROMPTS, **settings, seed=6)[0].token_ids
    )
    assert len({tuple(ids) for ids in first[0].token_ids}) > 1
    by_text = tunesmith.generate(loaded, ["hi"], max_new_tokens=4)[0]
    by_messages = tunesmith.generate(
        loaded, [[{"role": "user", "content": "hi"}]], max_new_tokens=4
    )[0]
    plain = tunesmith.generate(
        loaded,
        ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"],
        max_new_tokens=4,
        chat=False,
    )[0]
    assert by_text.token_ids == by_messages.token_ids == plain.token_ids


def test_it_works_inside_an_event_loop_and_refuses_one_bare_text(model: Path) -> None:
    loaded = CausalLM.load(model)

    async def notebook() -> list[Any]:
        return tunesmith.generate(loaded, ["7*6="], max_new_tokens=3)

    assert len(asyncio.run(notebook())) == 1
    assert tunesmith.generate(loaded, []) == []
    with pytest.raises(UserError, match="a list of prompts"):
        tunesmith.generate(loaded, "7*6=")
    with pytest.raises(UserError, match="greedy"):
        tunesmith.generate(loaded, ["x"], n=2, temperature=0.0)
    with pytest.raises(UserError, match="top_p"):
        tunesmith.generate(loaded, ["x"], top_p=1.5)
    with pytest.raises(AttributeError, match="no attribute"):
        getattr(tunesmith, "generat")  # noqa: B009


def test_the_record_of_a_failed_rollout_says_why() -> None:
    rollout = replace(Rollout(Task("t", "p", (5,))))
    rollout.fail(rollout.status.TIMED_OUT, "too slow")
    record = LineWriter(numbers, flat=True, scored=False).record(rollout)
    assert (
        record["error"] == "too slow"
        and record["reward"] is None
        and record["finish_reason"] == "abort"
    )


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        (["a"], {"stop": "END"}, "stop is one text"),
        ([None], {}, r"prompts\[0\]"),
        (["a", [{"content": "no role"}]], {}, r"prompts\[1\]"),
        ([[{"role": "user", "content": None}]], {}, r"prompts\[0\]"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    prompts: list[Any], settings: dict[str, Any], words: str, model: Path
) -> None:
    with pytest.raises(UserError, match=words):
        tunesmith.generate(model, prompts, **settings)


def test_prompts_may_come_one_by_one(model: Path) -> None:
    made = tunesmith.generate(
        CausalLM.load(model), (p for p in PROMPTS[:2]), max_new_tokens=2, chat=False
    )
    assert [generation.prompt for generation in made] == PROMPTS[:2]


def test_the_files_that_an_output_depends_on_may_be_moved_but_not_changed(tmp_path: Path) -> None:
    out = tmp_path / "completions.jsonl"
    out.touch()

    def begun_in(place: str, model: str = "model", digest: str | None = "1") -> None:
        said = {"model.path": f"{place}/{model}", "reward.functions": [f"{place}/r.py:f", "math"]}
        claim(out, said | ({CONTENTS: {"model": digest}} if digest else {}), tmp_path)

    begun_in("/old")
    begun_in("/new/place")
    for place, model, digest in (
        ("/old", "model", "2"),
        ("/old", "other", "1"),
        ("/old", "model", None),
    ):
        with pytest.raises(ConfigError, match=r"begun with model\.path"):
            begun_in(place, model, digest)
    begun_in("/new/place", digest=None)
    with pytest.raises(ConfigError, match=r"begun with model\.path"):
        begun_in("/old")


@pytest.mark.parametrize(("name", "key"), [("model", "model.path"), ("adapter", "lora.path")])
def test_weights_that_changed_in_their_place_do_not_go_on_with_an_output(
    tmp_path: Path, name: str, key: str
) -> None:
    out = tmp_path / "completions.jsonl"
    out.touch()
    said = {"model.path": "/m", "lora.path": "/a"}
    claim(out, said | {CONTENTS: {name: "1", "reward": "1"}}, tmp_path)
    claim(out, said | {CONTENTS: {name: "1", "reward": "2"}}, tmp_path)  # which the run tells
    with pytest.raises(ConfigError, match=f"in /{name[0]} (has|have) changed") as refused:
        claim(out, said | {CONTENTS: {name: "2", "reward": "2"}}, tmp_path)
    assert refused.value.keys == (key,)


def test_a_reward_that_changed_in_its_place_is_told(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = generate(tmp_path, model).output
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / "rewards.py").write_text(REWARDS.replace("sum(", "2 * sum("))
    capsys.readouterr()
    generate(tmp_path, model)
    assert "rewards are given by the new code" in capsys.readouterr().out


@CONFINED
def test_rewards_run_in_the_sandbox_that_was_chosen(tmp_path: Path, model: Path) -> None:
    tests = [{"input": "", "output": "yes\n"}]
    code = "```python\nimport os\nprint('yes' if os.environ.get('KEPT_HERE') else 'no')\n```"
    line = {"prompt": "p", "completion": code, "tests": tests}
    write_lines(tmp_path / "in.jsonl", [line])
    reward: dict[str, Any] = {"functions": ["code_tests"]}
    scored = {"reward": reward, "output": {"kind": "score"}, "sampling": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEPT_HERE", "1")
        for name, kept, score in (("in", ["KEPT_HERE"], 1.0), ("out", [], 0.0)):
            sandbox = {"type": "process", "env": kept}
            folder = f"run_dir={tmp_path / name}"
            done = generate(tmp_path, model, folder, environment={"sandbox": sandbox}, **scored)
            assert lines_of(done.output)[0]["reward"] == score
    with pytest.raises(ConfigError, match="there are none; leave it out"):
        generate(tmp_path, model, environment={"sandbox": "docker"}, reward={"functions": ["math"]})


@CONFINED
@pytest.mark.more
def test_lines_go_on_only_with_what_their_tests_counted(tmp_path: Path, model: Path) -> None:
    tests = ["assert True"]
    write_lines(tmp_path / "in.jsonl", [{"prompt": "1+1=", "tests": tests, "cases": tests}])
    reward: dict[str, Any] = {"functions": ["code_tests"]}
    generate(tmp_path, model, reward=reward)
    for key, value in (("partial_credit", False), ("tests", "cases")):
        with pytest.raises(ConfigError, match=rf"begun with reward\.{key}"):
            generate(tmp_path, model, reward=reward | {key: value})
    assert generate(tmp_path, model, reward=reward).lines == 1


def test_only_its_own_command_goes_on_in_a_directory_of_answers(tmp_path: Path) -> None:
    with recorded(tmp_path, "generate", lambda: (0, 0)):
        pass
    assert resumes("generate", False, tmp_path) == "auto"
    for command in ("rft", "rl"):
        with pytest.raises(ConfigError, match="holds a run of tunesmith generate"):
            resumes(command, "auto", tmp_path)


def test_a_damaged_report_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"usage": {')
    with pytest.raises(StorageError, match=r"report\.json: .*\. Delete it"):
        read_report(tmp_path / "report.json")
