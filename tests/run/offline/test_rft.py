"""Rejection-sampling fine-tuning: profiles, prompts, rounds, and what a run leaves."""

from __future__ import annotations

import json
import signal
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import tiny
from tests.support.machine_facts import CPU
from tests.support.tiny_runs import REWARDS, same_tensors, sums, untimed, write_lines
from tunesmith.cli.main import app
from tunesmith.config.commands import RFTConfig
from tunesmith.config.load import find_kind, load_config
from tunesmith.config.reading.files import find_model
from tunesmith.config.schema import DataSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.guide.recipes.unit_conversion import ANSWER, questions, write
from tunesmith.learn.data.prepare import load_samples, load_tasks
from tunesmith.learn.data.prompts import PromptEncoder, read_shots
from tunesmith.plan.derive.generation import rft_warmup
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.records.interrupts import Interrupted
from tunesmith.records.storage import read_json
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.offline.lines import read_lines
from tunesmith.run.offline.questions import with_shots
from tunesmith.run.offline.rft import RFTOutcome, run_rft
from tunesmith.run.offline.rounds import RftRound, adopt_answers, check_prompts
from tunesmith.run.offline.usage import Usage, seconds_of, total_of
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample, Task


def files(folder: Path) -> None:
    write_lines(folder / "train.jsonl", sums(12))
    write_lines(folder / "held_out.jsonl", sums(5, 100))
    write_lines(folder / "shots.jsonl", [{"prompt": "3+3=", "completion": "6"}])
    (folder / "rewards.py").write_text(REWARDS)


def said(folder: Path, model: Path, *overrides: str) -> list[str]:
    """A reward of which most untrained answers reach the low threshold; ends anywhere, because ';'
    is so frequent."""
    if not (folder / "train.jsonl").exists():
        files(folder)
    return [
        f"run_dir={folder / 'run'}",
        f"model.path={model}",
        "model.dtype=float32",
        "data.chat=false",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'held_out.jsonl'}",
        f'reward.functions=["{folder / "rewards.py"}:share"]',
        "reward.isolation=thread",
        "rft.threshold=0.05",
        "rft.select=all",
        "sampling.n=4",
        "sampling.max_new_tokens=12",
        f"sampling.stop_token_ids={list(range(20, 90))}",
        "train.epochs=1",
        "train.lr=1e-3",
        "system.threads=1",
        *overrides,
    ]


def rft(step: Any, folder: Path, model: Path, *overrides: str) -> RFTOutcome:
    return run_rft(step, None, said(folder, model, *overrides))


def resolved(*overrides: str) -> Any:
    base = ["model.path=org/model", "data.train=org/data", 'reward.functions=["math"]']
    return resolve(load_config(RFTConfig, None, [*base, *overrides]), Facts(CPU))


def test_profiles_are_those_of_the_guide_and_give_way_to_what_is_said() -> None:
    shared = {
        "train.epochs": 3.0,
        "monitor.every": 50,
        "sampling.n": 15,
        "sampling.temperature": 0.7,
    }
    tuned = {"train.batch_size": 64, "train.schedule": "cosine", "checkpoint.keep": 1}
    for name, expected in {
        "conservative": {**shared, "train.batch_size": 32, "system.gradient_checkpointing": True},
        "balanced": {**shared, **tuned, "system.gradient_checkpointing": False},
        "aggressive": {
            **shared,
            **tuned,
            "train.epochs": 2.0,
            "sampling.n": 12,
            "sampling.temperature": 0.5,
        },
    }.items():
        found = resolved(f"rft.profile={name}").settings
        assert {key: found[key] for key in expected} == expected
    made = resolved("rft.profile=aggressive", "sampling.n=3", "train.schedule=constant")
    assert (made.settings["sampling.n"], made.settings["train.schedule"]) == (3, "constant")
    reasons = {d.key: d.reason for d in made.reasons}
    assert reasons["train.epochs"].startswith("profile aggressive: ")
    assert "sampling.n" not in reasons and "train.schedule" not in reasons


def test_only_an_adapter_gets_the_guides_learning_rate() -> None:
    assert resolved("lora.rank=8").settings["train.lr"] == 2e-4
    assert resolved().settings["train.lr"] != 2e-4


def test_the_warm_up_is_never_longer_than_a_tenth_of_the_training() -> None:
    plan = resolved()
    assert rft_warmup(plan, 64 * 1000) == (50, "profile balanced")
    steps, reason = rft_warmup(plan, 640) or (0, "")
    assert (steps, "30 steps" in reason) == (3, True)
    assert rft_warmup(resolved("train.warmup_steps=7"), 640) is None
    assert rft_warmup(resolved("rft.profile=conservative"), 640) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=5", "train.epochs"),
        ("sampling.temperature=0", "greedy"),
        ("rft.start=last", "no effect with rft.rounds = 1"),
        ("rft.few_shot_separator=x", "without rft.few_shot"),
        ("data.loss_on=all", "data.loss_on has no effect"),
        ("rft.profile=bold", "it must be one of 'conservative'"),
        ('reward.models=[{path="org/judge"}]', "rft.threshold is missing"),
        ("checkpoint.resume=true", "checkpoint.resume has no effect"),
        ("eval.use_ema=true", "eval.use_ema has no effect"),
        (f"rft.answers={__file__} sampling.n=3", "sampling.n has no effect with rft.answers"),
        (f"rft.answers={__file__} rft.sampler=o/m", "rft.sampler has no effect with rft.answers"),
        ("rft.sampler=o/m rft.rounds=2", "rft.rounds = 2"),
    ],
)
def test_what_would_be_ignored_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*override.split())
    assert message in str(caught.value)


def test_the_kind_of_a_run_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[rft]\nrounds = 2\n[reward]\n")
    assert find_kind(tmp_path / "a.toml") is RFTConfig


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_encoder_makes_the_tokens_of_the_loader_and_puts_examples_before(
    tmp_path: Path, chat: bool, system: str | None
) -> None:
    if system and not chat:
        return
    files(tmp_path)
    tokenizer: Any = tiny.tokenizer()
    section = DataSection(train=str(tmp_path / "train.jsonl"), chat=chat, system_prompt=system)
    tasks = load_tasks(section, section.train, tokenizer).items
    encoder = PromptEncoder.of(section, tokenizer, [t.prompt for t in tasks], "\n\n")
    assert [tuple(encoder.ids(t.prompt)) for t in tasks] == [t.prompt_ids for t in tasks]
    shown = tokenizer.decode(encoder.ids("4+4=", None, read_shots(tmp_path / "shots.jsonl")))
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    turns = (
        "<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n6<|im_end|>\n"
        "<|im_start|>user\n4+4=<|im_end|>\n"
    )
    assert shown == (f"{before}{turns}<|im_start|>assistant\n" if chat else "3+3=6\n\n4+4=")


def test_tools_stay_with_worked_examples(tmp_path: Path) -> None:
    files(tmp_path)
    tokenizer: Any = tiny.tokenizer()
    template = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] "
        "}}{% endfor %}<assistant>"
    )
    tokenizer.chat_template = template
    encoder = PromptEncoder.of(DataSection(train="train.jsonl", chat=True), tokenizer, ["4+4="])
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    shots = read_shots(tmp_path / "shots.jsonl")
    task = Task("t", "4+4=", (1,), tools=tools)
    shown = tokenizer.decode(with_shots(task, encoder, shots, None).prompt_ids)
    assert '"add"' in shown and "<user>3+3=<assistant>6<user>4+4=<assistant>" in shown


def test_a_worked_example_without_an_answer_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "shots.jsonl", [{"prompt": "3+3="}])
    with pytest.raises(DataError, match=r"shots\.jsonl:1: no completion"):
        read_shots(tmp_path / "shots.jsonl")


def test_training_on_other_prompt_tokens_than_are_asked_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"task": 0, "prompt": "p", "completion": "c"}])
    task = Task("t", "p", (5, 6))
    sample = Sample([5, 6, 7], [False, False, True])
    check_prompts(tmp_path / "train.jsonl", [sample], [task])
    with pytest.raises(DataError, match=r"train\.jsonl:1: .* 2 tokens.* 3 "):
        check_prompts(tmp_path / "train.jsonl", [sample], [replace(task, prompt_ids=(5, 5, 6))])


@pytest.mark.parametrize("talk", [False, True])
def test_a_question_is_templated_once_in_training_as_when_it_is_asked(
    tmp_path: Path, talk: bool
) -> None:
    tokenizer: Any = tiny.tokenizer()
    asked = [{"role": "user", "content": "1+1="}] if talk else "1+1="
    write_lines(tmp_path / "in.jsonl", [{"prompt": asked}])
    section = DataSection(train=str(tmp_path / "in.jsonl"), chat=True, system_prompt="Be brief.")
    tasks = load_tasks(section, section.train, tokenizer).items

    def learned(prompt: Any) -> list[Sample]:
        path = write_lines(
            tmp_path / "train.jsonl", [{"task": 0, "prompt": prompt, "completion": "2"}]
        )
        data = DataSection(
            train=str(path),
            prompt="prompt",
            completion="completion",
            chat=True,
            system_prompt="Be brief.",
        )
        return load_samples(data, data.train, tokenizer).items

    samples = learned(tasks[0].prompt)
    check_prompts(tmp_path / "train.jsonl", samples, tasks)
    assert tokenizer.decode(samples[0].token_ids).count("<|im_start|>assistant") == 1
    with pytest.raises(DataError, match="chat template"):
        check_prompts(
            tmp_path / "train.jsonl", learned(tokenizer.decode(tasks[0].prompt_ids)), tasks
        )


@pytest.mark.slow
def test_a_whole_run_of_two_rounds_and_again_changes_nothing(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "rft.rounds=2",
        "rft.start=last",
        f"rft.few_shot={tmp_path / 'shots.jsonl'}",
        "rft.few_shot_separator=;",
    ]
    done = rft("run", tmp_path, model, *more)
    shown = capsys.readouterr().out
    assert shown.count("\ntrain.batch_size ") == 2, "of the run and of the first round's training"
    assert "round-1 sampling: completions 48/48" in shown and "step 0/" not in shown
    evaluations = [
        read_json(done.run_dir / name / "evaluation.json") for name in ("base", "round-1")
    ]
    assert [shares["few_shot"] for shares in evaluations] == [True, False]
    assert list(done.evaluations) == ["base", "round-1", "round-2"] and list(done.yields) == [
        "round-1",
        "round-2",
    ]
    assert done.model and (done.model / "config.json").is_file() and "round-2" in str(done.model)
    learned = list(read_lines(tmp_path / "run" / "round-1" / "train.jsonl"))
    assert {line["prompt"] for line in learned} <= {s["prompt"] for s in sums(12)}, (
        "no worked example in training"
    )
    assert not any(";" in line["completion"] for line in learned)
    second = (tmp_path / "run" / "round-2" / "sft.toml").read_text()
    assert "round-1/sft/checkpoints" in second
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["evaluations"]["base"]["questions"] == 5
    took = report["usage"]
    assert list(took) == ["total", "setup", "base", "round-1", "round-2"]
    assert {name for name in took["round-2"] if name.startswith("seconds/")} == {
        "seconds/sampling", "seconds/training", "seconds/evaluation", "seconds/setup"
    }  # fmt: skip
    assert took["base"]["seconds/evaluation"] > 0 and "seconds/sampling" not in took["base"]
    assert took["base"]["kv_peak"] > 0 and 0 < took["round-2"]["kv_used"] <= 1
    assert took["total"]["memory/host_peak"] == max(
        took[part]["memory/host_peak"] for part in list(took)[2:]
    )
    assert done.usage == took["total"] and done.earlier == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.jsonl")}
    again = rft("run", tmp_path, model, *more)
    assert again == done
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.jsonl")} == before
    assert again.earlier == pytest.approx(sum(seconds_of(done.usage).values()))
    assert sum(seconds_of(again.usage).values()) > again.earlier, (
        "what an earlier call took is added"
    )
    assert 1.0 <= again.usage["seconds/training"] / done.usage["seconds/training"] < 1.5, (
        "nothing was trained again"
    )
    moved = done.run_dir.rename(tmp_path / "moved")
    later = rft("run", tmp_path, model, *more, f"run_dir={moved}")
    assert later.model == moved / done.model.relative_to(done.run_dir) and later.model.is_dir()
    assert Path(find_model(str(moved), [tmp_path])).samefile(later.model)
    with pytest.raises(ConfigError, match=r"all 2 rounds.*are trained"):
        rft("generate", tmp_path, model, *more, f"run_dir={moved}")
    checked = CliRunner().invoke(app, ["check", str(moved)])
    assert checked.exit_code == 0 and checked.output.count(": whole") == 2


@pytest.mark.slow
def test_the_steps_one_by_one_end_where_a_run_ends_even_when_cut_off(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ConfigError, match="tunesmith rft generate"):
        rft("train", tmp_path, model)
    rft("generate", tmp_path, model)
    samples = tmp_path / "run" / "round-1" / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole[: len(whole) * 2 // 3])
    rft("generate", tmp_path, model)
    assert samples.read_bytes() == whole
    with pytest.raises(ConfigError, match=r"begun with sampling\.n = 4"):
        rft("generate", tmp_path, model, "sampling.n=5")
    rft("train", tmp_path, model)
    done = rft("evaluate", tmp_path, model)
    assert {"sampling", "training", "evaluation", "setup"} == set(seconds_of(done.usage)), (
        "of all calls"
    )
    assert list(done.evaluations) == ["round-1"]
    fewer = rft(
        "evaluate", tmp_path, model, "sampling.n=5", "sampling.seed=9", "eval.max_prompts=3"
    )
    assert fewer.evaluations["round-1"]["questions"] == 3, (
        "greedy answers do not depend on how samples are drawn"
    )
    assert rft("evaluate", tmp_path, model) == done
    straight = tmp_path / "straight"
    straight.mkdir()
    other = rft(
        "run", straight, model, f"data.train={tmp_path / 'train.jsonl'}", "eval.at_start=false"
    )
    assert (straight / "run" / "round-1" / "samples.jsonl").read_bytes() == whole
    assert other.evaluations == done.evaluations


def test_usage_divides_the_time_of_a_call_among_parts_and_adds_earlier_calls() -> None:
    moments = iter([0.0, 1.0, 3.0, 7.0, 12.0, 20.0])
    usage = Usage(lambda: next(moments))
    usage.add_earlier({"round-1": {"seconds/sampling": 100.0, "kv_peak": 50.0}})
    with usage.phase("sampling", "round-1"), usage.phase("setup"):
        usage.add_engine(EngineStats(peak_kv_bytes=40, kv_budget_bytes=80))
    parts = usage.parts()
    assert {k: v for k, v in parts["round-1"].items() if "memory" not in k} == {
        "seconds/sampling": 107.0, "seconds/setup": 4.0, "kv_peak": 50.0, "kv_used": 0.5
    }  # fmt: skip
    assert parts["setup"] == {"seconds/setup": 9.0} and usage.earlier == 100
    assert seconds_of(total_of(parts.values())) == {"sampling": 107.0, "setup": 13.0}


@pytest.mark.slow
def test_the_training_of_a_round_shows_as_said_only_what_was_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rft("generate", tmp_path, model)
    capsys.readouterr()
    rft("train", tmp_path, model, "monitor.run_name=mine")
    shown = capsys.readouterr().out
    training = shown[shown.index("round-1/train.jsonl") :].splitlines()
    reasons = {
        line.split()[0]: line.partition("  ")[2].strip()
        for line in training
        if "." in line.split("  ")[0]
    }
    as_said = {key for key, rest in reasons.items() if rest.endswith("as you said")}
    assert as_said == {
        "model.path",
        "model.dtype",
        "data.chat",
        "train.epochs",
        "train.lr",
        "system.threads",
    }
    assert (
        "lowered from 64" in reasons["train.batch_size"]
        and "profile balanced" in reasons["checkpoint.keep"]
    )
    assert reasons["train.warmup_steps"].endswith("no more than a tenth of 1 steps")
    for key in ("data.train", "data.prompt", "monitor.run_name", "checkpoint.resume"):
        assert reasons[key].endswith("round 1 of tunesmith rft")
    written = tomllib.loads((tmp_path / "run" / "round-1" / "sft.toml").read_text())
    assert written["system"].keys() == {"threads"}  # the others are derived for the training alone


@pytest.mark.slow
def test_a_compiling_sampler_and_the_system_of_a_profile_go_into_the_training(
    tmp_path: Path, model: Path
) -> None:
    done = rft(
        "run",
        tmp_path,
        model,
        "system.compile=true",
        "rft.profile=conservative",
        "eval.at_start=false",
    )
    written = tomllib.loads((done.run_dir / "round-1" / "sft.toml").read_text())
    assert (
        written["system"] == {"threads": 1, "gradient_checkpointing": True}
        and done.model is not None
    )


def test_evaluation_needs_questions(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval is missing"):
        run_rft(
            "evaluate", None, [s for s in said(tmp_path, model) if not s.startswith("data.eval")]
        )


def test_unit_conversion_splits_share_no_question_and_answers_are_right(tmp_path: Path) -> None:
    import re
    from decimal import Decimal

    write(tmp_path, seed=3, train=300, val=50, test=50)
    splits = {
        name: list(read_lines(tmp_path / f"{name}.jsonl")) for name in ("train", "val", "test")
    }
    assert [len(part) for part in splits.values()] == [300, 50, 50]

    def conversion(prompt: str) -> tuple[str, str, str]:
        value = re.search(r"(\d+) (\w+)", prompt)
        assert value
        to = re.search(r"many (\w+)|(?:to|in) (\w+)[.?]$", prompt)
        assert to
        return value[1], value[2], to[1] or to[2]

    asked = [conversion(line["prompt"]) for part in splits.values() for line in part]
    assert len(set(asked)) == 400
    for one in questions(3, 200)[0]:
        found = re.search(ANSWER, one.worked)
        assert found and found[1] == one.answer
        value, factor, answer = re.findall(r"(\S+) \* (\S+) = (\S+)\.", one.worked)[0]
        assert Decimal(value) * Decimal(factor) == Decimal(answer)
    assert all(
        line["completion"].endswith("</answer>") for line in read_lines(tmp_path / "few_shot.jsonl")
    )
    with pytest.raises(ValueError, match="questions were asked for"):
        questions(0, 10**6)


@pytest.mark.slow
def test_another_model_answers_and_this_one_learns(tmp_path: Path, model: Path) -> None:
    """The sampler asks in its own tokens; what it answered is trained in those of the model."""
    files(tmp_path)
    other = tiny.save_model(tmp_path / "other", seed=5, hidden_size=48)
    alone = rft("generate", tmp_path, other, f"run_dir={tmp_path / 'alone'}")
    done = rft("run", tmp_path, model, f"rft.sampler={other}")
    answers = [
        (d / "round-1" / "samples.jsonl").read_bytes() for d in (alone.run_dir, done.run_dir)
    ]
    assert answers[0] == answers[1] and done.model is not None
    assert json.loads((done.model / "config.json").read_text())["hidden_size"] == 32
    assert 'path = "' + str(model) in (done.run_dir / "round-1" / "sft.toml").read_text()


@pytest.mark.slow
def test_the_same_answers_are_trained_on_again_with_other_settings(
    tmp_path: Path, model: Path
) -> None:
    first = rft("run", tmp_path, model, "eval.at_start=false")
    answers = first.run_dir / "round-1" / "samples.jsonl"
    settings = [
        s for s in said(tmp_path, model) if not s.startswith("sampling.n") and "stop_token" not in s
    ]
    again = run_rft(
        "train",
        None,
        [*settings, f"run_dir={tmp_path / 'again'}", f"rft.answers={answers}", "rft.select=first"],
    )
    assert (again.run_dir / "round-1" / "samples.jsonl").read_bytes() == answers.read_bytes()
    assert (
        0 < again.yields["round-1"]["kept"] < first.yields["round-1"]["kept"]
        and again.model is not None
    )
    write_lines(tmp_path / "train.jsonl", sums(12, 7))
    with pytest.raises(DataError, match=r"samples\.jsonl:1 "):
        run_rft(
            "train", None, [*settings, f"run_dir={tmp_path / 'third'}", f"rft.answers={answers}"]
        )


def test_answers_of_another_run_are_those_of_its_questions(tmp_path: Path) -> None:
    asked = [{"prompt": p, "completion": "1", "reward": 1.0} for p in ("a", "b")]
    tasks = [Task(id=p, prompt=p, prompt_ids=(1,)) for p in ("a", "b")]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n" + "\n\n".join(map(json.dumps, asked)) + "\n \n")
    this = RftRound(tmp_path / "round-1")
    with pytest.raises(DataError, match=r"answers\.jsonl:4 .* task c"):
        adopt_answers(answers, this, [tasks[0], replace(tasks[1], id="c", prompt="c")])
    for line in ("[1]", "null", '{"prompt": "a"}'):
        other = tmp_path / "other.jsonl"
        other.write_text(f"{line}\n")
        with pytest.raises(DataError, match=r"other\.jsonl:1 "):
            adopt_answers(other, this, tasks[:1])
    adopt_answers(answers, this, tasks)
    assert list(read_lines(this.samples)) == asked


@pytest.mark.parametrize(
    ("before", "after", "fell"), [((0.5, 0.7), (0.1, 0.4), True), ((0.5, 0.7), (0.4, 0.55), False)]
)
def test_a_fall_is_told_from_chance(
    before: tuple[float, float], after: tuple[float, float], fell: bool
) -> None:
    from tunesmith.run.offline.rounds import fallen

    assert fallen({"accuracy": [0.6, *before]}, {"accuracy": [0.3, *after]}) is fell


@pytest.mark.slow
def test_the_engine_that_samples_is_not_handed_to_the_training(tmp_path: Path, model: Path) -> None:
    """Training reads no key of a sampler, and would refuse one."""
    sampler = ('system.engine="local"', "system.max_running=7", 'system.kv_memory="32MB"')
    assert rft("run", tmp_path, model, *sampler, "rft.rounds=1").model is not None


@pytest.mark.slow
def test_a_training_that_a_signal_ends_goes_on_and_ends_the_same(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = rft("run", tmp_path, model, f"run_dir={tmp_path / 'straight'}", "train.batch_size=8")
    taken = TorchBackend.step

    def step(self: TorchBackend[Any], lr: float) -> dict[str, float]:
        if self.optimizer_steps == 2:
            signal.raise_signal(signal.SIGTERM)
        return taken(self, lr)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(TorchBackend, "step", step)
        rft("run", tmp_path, model, "train.batch_size=8")
    sft = tmp_path / "run/round-1/sft"
    assert [p.name for p in (sft / "checkpoints").iterdir()] == ["step-000003"]
    again = rft("run", tmp_path, model, "train.batch_size=8")
    assert straight.model is not None and again.model is not None
    same_tensors(straight.model, again.model)
    assert not (again.model.parent / "optimizer.safetensors").exists(), "nothing reads it any more"
    assert untimed(straight.run_dir / "round-1/sft/metrics.jsonl") == untimed(sft / "metrics.jsonl")
