"""Small whole runs of ``rm``, ``dpo``, ``kto`` and ``prm``: metrics, evaluation, resume; models
that others load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.commands import tunesmith
from tests.support.tiny import save_model
from tests.support.tiny_preferences import RUNS, lines_of, preference_settings
from tests.support.tiny_runs import same_tensors, untimed, write_lines
from tunesmith.config.schema import ModelReward, RewardSection
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.loading import check_rewards
from tunesmith.records.metrics import read_metrics
from tunesmith.run.assembly import run_merge
from tunesmith.run.loop.checkpoint import read_state
from tunesmith.run.loop.learner import Learner

COMMANDS = ("rm", "dpo", "kto", "prm")


CASES: list[tuple[str, dict[str, Any]]] = [
    ("rm", {}),
    ("rm", {"rm__loss": "logexp"}),
    ("dpo", {}),
    ("dpo", {"dpo__precompute_reference": True}),
    ("dpo", {"dpo__loss": "ipo", "dpo__nll_coef": 0.1}),
    ("dpo", {"dpo__loss": "hinge"}),
    ("kto", {"kto__undesirable_weight": 1.5}),
    ("kto", {"kto__precompute_reference": True}),
    ("prm", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "changed"), CASES)
def test_runs_tell_what_they_should_and_resume_bitwise(
    tmp_path: Path, model: Path, command: str, changed: dict[str, Any]
) -> None:
    straight = RUNS[command](
        None, preference_settings(command, tmp_path, model, "straight", **changed)
    )
    lines = read_metrics(straight.run_dir / "metrics.jsonl")
    steps = [x for x in lines if "loss" in x]
    evaluations = straight.evaluations
    wanted = {"loss", "accuracy"} | (
        set() if command == "prm" else {"rewards/chosen", "rewards/rejected", "margin"}
    )
    wanted |= {"rm": {"rewards/mean", "rewards/std"}, "kto": {"kl"}}.get(command, set())
    wanted |= {"nll"} if "dpo__nll_coef" in changed else set()
    assert len(steps) == 4 and all(
        wanted | {"grad_norm", "tokens", "epoch"} <= x.keys() for x in steps
    )
    assert [x["step"] for x in evaluations] == [0, 2, 4]
    assert all({f"eval/{name}" for name in wanted} <= x.keys() for x in evaluations)
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"]
    if command != "prm":
        assert evaluations[0]["eval/accuracy"] == 0.5, "rounding is no opinion"
    first = {
        "rm": 0.693,
        "dpo": 0.693,
        "kto": 0.5 * 1.25 if changed.get("kto__undesirable_weight") else 0.5,
    }
    if command in first and "dpo__loss" not in changed:
        assert evaluations[0]["eval/loss"] == pytest.approx(first[command], abs=1e-3)

    settings = preference_settings(command, tmp_path, model, "parts", **changed)
    RUNS[command](None, [*settings, "train.steps=2"])
    resumed = RUNS[command](None, [*settings, "checkpoint.resume=true"])
    names = [o.checkpoint.parent for o in (straight, resumed)]
    same_tensors(*names)
    assert read_state(names[0]) == read_state(names[1])
    assert untimed(straight.run_dir / "metrics.jsonl") == untimed(resumed.run_dir / "metrics.jsonl")
    assert (names[0] / "reference.safetensors").exists() == bool(
        changed.get(f"{command}__precompute_reference")
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_micro_batches_change_rounding_only(tmp_path: Path, model: Path, command: str) -> None:
    def course(run: str, **changed: Any) -> list[dict[str, Any]]:
        settings = preference_settings(command, tmp_path, model, run, train__steps=2, **changed)
        return read_metrics(RUNS[command](None, settings).run_dir / "metrics.jsonl")

    whole = course("whole")
    cut = course("cut", system__max_tokens_per_microbatch=32, system__share_prompts=False)
    for a, b in zip(whole, cut, strict=True):
        for name in ("loss", "grad_norm", "margin", "eval/loss", "eval/margin"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-6), name
    assert cut[1]["microbatches"] > whole[1]["microbatches"] == 1


@pytest.mark.slow
def test_a_precomputed_reference_trains_the_same(tmp_path: Path, model: Path) -> None:
    """With no second model: nothing is left to score the reference with."""
    for command in ("dpo", "kto"):
        kept, scored = (
            read_metrics(
                RUNS[command](
                    None, preference_settings(command, tmp_path, model, f"{command}-{precompute}",
                                              **{f"{command}__precompute_reference": precompute})
                ).run_dir / "metrics.jsonl"
            )
            for precompute in (False, True)
        )  # fmt: skip
        for a, b in zip(kept, scored, strict=True):
            for name in ("loss", "margin", "grad_norm", "eval/loss"):
                if name in a:
                    assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-5), name


@pytest.mark.more
def test_transformers_gives_the_reward_models_scores_and_its_statistics(
    tmp_path: Path, model: Path
) -> None:
    settings = preference_settings("rm", tmp_path, model, train__steps=12, train__lr=5e-3)
    outcome = RUNS["rm"](None, settings)
    theirs = AutoModelForSequenceClassification.from_pretrained(outcome.checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(outcome.checkpoint)
    held_out = lines_of("rm", 16, 100)
    texts = [
        line["prompt"] + line[name] + tokenizer.eos_token
        for line in held_out
        for name in ("chosen", "rejected")
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = (
            theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].numpy()
        )
    last = outcome.evaluations[-1]
    assert last["eval/accuracy"] == np.mean(scores[0::2] > scores[1::2])
    assert last["eval/margin"] == pytest.approx(np.mean(scores[0::2] - scores[1::2]), abs=1e-4)
    stats = json.loads((outcome.checkpoint / "reward_stats.json").read_text())
    assert stats == {
        "mean": pytest.approx(scores.mean(), abs=1e-4),
        "std": pytest.approx(scores.std(), abs=1e-4),
    }
    assert stats["std"] > 1e-3


def test_the_score_is_not_read_at_padding_that_is_the_end_of_a_text(tmp_path: Path) -> None:
    """Many tokenizers pad with EOS, and transformers would look before it."""
    path = save_model(tmp_path / "model", pad_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    outcome = RUNS["rm"](None, preference_settings("rm", tmp_path, path, train__lr=5e-3))
    theirs = AutoModelForSequenceClassification.from_pretrained(outcome.checkpoint).eval()
    saved = AutoTokenizer.from_pretrained(outcome.checkpoint)
    assert saved.pad_token_id == theirs.config.pad_token_id != saved.eos_token_id
    texts = [
        s["prompt"] + s[k] + saved.eos_token
        for s in lines_of("rm", 16, 100)
        for k in ("chosen", "rejected")
    ]
    batch = saved(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert (scores[0::2] - scores[1::2]).mean().item() == pytest.approx(
        outcome.evaluations[-1]["eval/margin"], abs=1e-4
    )


def test_transformers_gives_the_process_reward_models_judgement(
    tmp_path: Path, model: Path
) -> None:
    outcome = RUNS["prm"](None, preference_settings("prm", tmp_path, model))
    theirs = AutoModelForCausalLM.from_pretrained(outcome.checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(outcome.checkpoint)
    marks = tokenizer.convert_tokens_to_ids(["+", "-"])
    losses: list[float] = []
    for line in lines_of("prm", 16, 100):
        ids = tokenizer(
            line["prompt"] + "".join(f"{step}\n" for step in line["completions"])
        ).input_ids
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0][:, marks].log_softmax(-1)
        ends = [k for k, token in enumerate(ids) if tokenizer.decode([token]) == "\n"]
        losses += [
            -logits[k, 0 if good else 1].item()
            for k, good in zip(ends, line["labels"], strict=True)
        ]
    assert outcome.evaluations[-1]["eval/loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.more
def test_resuming_without_the_saved_reference_scores_the_model_the_run_began_with(
    tmp_path: Path, model: Path
) -> None:
    settings = preference_settings("dpo", tmp_path, model)
    RUNS["dpo"](None, [*settings, "train.steps=2"])
    again = [*settings, "checkpoint.resume=true", "dpo.precompute_reference=true"]
    lines = RUNS["dpo"](None, again).evaluations
    straight = RUNS["dpo"](
        None, preference_settings("dpo", tmp_path, model, "straight")
    ).evaluations
    assert lines[-1]["eval/loss"] == pytest.approx(straight[-1]["eval/loss"], rel=1e-4)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.more
def test_an_adapter_is_merged_in_the_run_and_afterwards(
    command: str, tmp_path: Path, model: Path
) -> None:
    adapter = {"lora__rank": 2, "lora__save_merged": True}
    settings = preference_settings(command, tmp_path, model, train__steps=2, **adapter)
    saved = RUNS[command](None, settings).checkpoint
    files = {file.name for file in saved.iterdir() if "adapter" not in file.name}
    assert ("reward_stats.json" in files) == (command == "rm")
    merged = tmp_path / "merged"
    run_merge(saved, merged)
    same_tensors(saved.with_name("model_merged"), merged)
    for whole in (saved.with_name("model_merged"), merged):
        assert files - {"README.md"} <= {file.name for file in whole.iterdir()}
        if command == "rm":
            reward = RewardSection(models=(ModelReward(path=str(whole), normalize=True),))
            check_rewards(reward, tmp_path)


def test_without_held_out_data_there_are_no_statistics(tmp_path: Path, model: Path) -> None:
    settings = preference_settings("rm", tmp_path, model, data__eval=None, eval__every=None)
    outcome = RUNS["rm"](None, settings)
    assert not outcome.evaluations and not (outcome.checkpoint / "reward_stats.json").exists()


@pytest.mark.slow
def test_bad_input_ends_with_code_2_before_a_model_is_loaded(tmp_path: Path, model: Path) -> None:
    (tmp_path / "none.toml").touch()
    for command in COMMANDS:
        preference_settings(command, tmp_path, model)
    write_lines(tmp_path / "bad.jsonl", [{"prompt": "a", "chosen": "b"}])
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("dpo", {"data__train": "bad.jsonl"}, ["bad.jsonl:1", "no rejected"]),
        ("rm", {"data__train": "kto.jsonl"}, ["no chosen and no rejected"]),
        (
            "kto",
            {"data__train": "prm.jsonl"},
            ["prm.jsonl:1", "needs a prompt, a completion and 'label'"],
        ),
        ("prm", {"data__train": "rm.jsonl"}, ["no completions and no labels"]),
        (
            "dpo",
            {"dpo__loss": "ipo", "dpo__label_smoothing": 0.1},
            ["dpo.label_smoothing", "sigmoid"],
        ),
        ("dpo", {"dpo__beta": 0}, ["dpo.beta"]),
        ("dpo", {"dpo__loss": "sigmod"}, ["dpo.loss", "Did you mean 'sigmoid'"]),
        ("kto", {"kto__desirable_weight": 0, "kto__undesirable_weight": 0}, ["both 0"]),
        ("prm", {"prm__bad": "+"}, ["prm.good", "different"]),
        ("rm", {"dpo__beta": 0.1}, ["dpo"]),
        ("rm", {"eval__samples": 4}, ["eval.samples", "no effect"]),
        ("dpo", {"train__rpo_alpha": 1}, ["train.rpo_alpha is called dpo.nll_coef here"]),
        ("rm", {"rm__compute_fp32_loss": True}, ["always float32"]),
    ]
    commands = [
        [command, "none.toml", *preference_settings(command, tmp_path, model, **changed)]
        for command, changed, _ in cases
    ]
    for (command, changed, words), ended in zip(cases, tunesmith(tmp_path, commands), strict=True):
        assert ended.code == 2 and "Traceback" not in ended.told, (command, changed, ended.told)
        assert all(word in ended.told for word in words), (command, changed, ended.told)
        assert not ended.loaded, (command, changed)


def test_what_needs_the_tokenizer_is_refused_before_the_model_is_loaded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunesmith.models import loading

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load_module", load)
    long = write_lines(
        tmp_path / "long.jsonl",
        [*lines_of("dpo", 3), {"prompt": "a", "chosen": "b" * 30, "rejected": "c"}],
    )
    margins = write_lines(
        tmp_path / "margins.jsonl", [{**line, "margin": 1} for line in lines_of("rm", 3)]
    )
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "dpo",
            {"data__train": str(long), "system__max_tokens_per_microbatch": 33},
            r"long\.jsonl:4: .* 34 tokens together",
        ),
        ("dpo", {"data__train": str(long), "data__max_tokens": 20}, r"long\.jsonl:4: 32 tokens"),
        ("rm", {"data__train": str(margins), "rm__loss": "logexp"}, "has no margin"),
        ("rm", {"system__logprob_chunk": 8}, "system.logprob_chunk has no effect"),
        ("prm", {"prm__good": "good"}, "prm.good = 'good' is 4 tokens"),
    ]
    for command, changed, words in cases:
        with pytest.raises(ValueError, match=words):
            RUNS[command](None, preference_settings(command, tmp_path, model, command, **changed))


def test_an_unknown_metric_for_the_best_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval/acuracy.*Did you mean 'eval/accuracy'"):
        RUNS["dpo"](None, preference_settings("dpo", tmp_path, model, eval__metric="eval/acuracy"))


def test_the_evaluation_of_a_broken_model_is_never_the_best(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Learner.evaluate
    made = list[int]()

    def broken(self: Learner, *args: Any, **kwargs: Any) -> dict[str, float]:
        made.append(1)
        found = evaluate(self, *args, **kwargs)
        return found if len(made) == 1 else dict.fromkeys(found, math.nan)

    monkeypatch.setattr(Learner, "evaluate", broken)
    outcome = RUNS["dpo"](None, preference_settings("dpo", tmp_path, model, train__steps=2))
    assert outcome.evaluations[-1]["eval/accuracy"] is None
    assert read_state(outcome.checkpoint.parent)["best"] == {"eval/accuracy": [0.5, 0]}
