"""What a person gets for bad input: exit code 2, one message that names the place, and nothing
loaded in vain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import tunesmith
from tests.support.tiny import save_model, tokenizer
from tests.support.tiny_runs import rl_settings, sft_settings, sums, write_lines
from tunesmith.run.loop.manifest import write_manifest


@pytest.mark.slow
def test_what_settings_and_the_first_lines_show_is_refused_without_torch(
    tmp_path: Path, model: Path
) -> None:
    rl_settings(tmp_path, model)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    write_lines(tmp_path / "no_prompt.jsonl", [{"problem_text": "1+1", "answer": "2"}])
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"\n')
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{model}"\n\n[data]\ntrain = "train.jsonl"\n\n[reward]\n'
        f'functions = ["rewards.py:share"]\n\n'
        "[rollout]\ngroup_siez = 4\n"
    )
    changes: list[tuple[list[str], list[str]]] = [
        (["run.toml"], ["run.toml, line 11", "rollout.group_siez", "group_size"]),
        (["train.learning_rate=1"], ["train.learning_rate", "train.lr"]),
        (['reward.functions=["gone.py:f"]'], ["gone.py", "does not exist"]),
        (['reward.functions=["rewards.py:shar"]'], ["shar", "Did you mean 'share'"]),
        (['reward.functions=["syntax.py:f"]'], ["syntax.py", "1"]),
        (['reward.functions=["exact_mach"]'], ["exact_mach", "exact_match"]),
        (["data.train=empty.jsonl"], ["empty.jsonl", "empty"]),
        (["data.train=blank.jsonl"], ["blank.jsonl"]),
        (["data.train=no_prompt.jsonl"], ["no_prompt.jsonl", "prompt", "problem_text"]),
        (["data.prompt=question"], ["train.jsonl", "question", "prompt, answer"]),
        (["data.train=broken.jsonl"], ["broken.jsonl:1"]),
        (["data.eval=gone.jsonl"], ["gone.jsonl"]),
        (["rollout.group_size=1"], ["group_size", "algorithm.name = 'reinforce'"]),
        (["train.steps=2", "train.warmup_steps=3"], ["train.warmup_steps = 3", "at most 2"]),
        (["train.batch_size=7"], ["train.batch_size = 7", "4 or 8"]),
        (["system.max_tokens_per_microbatch=4"], ["max_tokens_per_microbatch = 4", "at least 9"]),
        (["rollout.temperature=0"], ["rollout.temperature = 0"]),
        (["eval.every=2"], ["eval.every", "data.eval"]),
        (["checkpoint.resume=true"], ["no run to resume", "run"]),
    ]
    commands: list[list[str]] = []
    for said, _ in changes:
        base = [] if said == ["run.toml"] else rl_settings(tmp_path, model)
        keys = {s.partition("=")[0] for s in said}
        empty = tmp_path / "none.toml"
        empty.touch()
        first = (
            said
            if said == ["run.toml"]
            else [str(empty), *(b for b in base if b.partition("=")[0] not in keys), *said]
        )
        commands.append(["rl", *first])
    for (said, words), ended in zip(changes, tunesmith(tmp_path, commands), strict=True):
        assert ended.code == 2, (said, ended)
        assert ended.told.startswith("error: ") and "Traceback" not in ended.told, (
            said,
            ended.told,
        )
        assert all(word in ended.told for word in words), (said, ended.told)
        assert not ended.loaded, said
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_what_needs_the_tokenizer_is_refused_before_the_model_is_loaded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunesmith.cli import main as cli
    from tunesmith.models.causal_lm import CausalLM

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(CausalLM, "load", load)
    rl_settings(tmp_path, model)
    (tmp_path / "none.toml").touch()
    long = write_lines(tmp_path / "long.jsonl", [*sums(3), {"prompt": "a" * 600, "answer": "b"}])
    bare = save_model(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    unfinished = tmp_path / "unfinished"
    tokenizer().save_pretrained(unfinished)
    other = save_model(tmp_path / "other", num_hidden_layers=1)
    checkpoint = tmp_path / "old/checkpoints/step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"step": 3}')
    (checkpoint / "model").mkdir()
    (checkpoint / "model/config.json").write_text((other / "config.json").read_text())
    write_manifest(checkpoint)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/metrics.jsonl").write_text('{"step": 0}\n')
    needs = f"{tmp_path / 'rewards.py'}:needs"
    cases: list[tuple[list[str], list[str]]] = [
        (
            rl_settings(tmp_path, model, data__train=str(long)),
            ["long.jsonl:4", "600 tokens", "504"],
        ),
        (
            rl_settings(tmp_path, model, data__max_prompt_tokens=5),
            ["train.jsonl:11", "6 tokens, the limit is 5"],
        ),
        (rl_settings(tmp_path, model, data__eval=str(long)), ["long.jsonl:4", "600 tokens"]),
        (
            rl_settings(tmp_path, model, system__max_tokens_per_microbatch=12),
            ["train.jsonl:11", "6 tokens", "4"],
        ),
        (
            rl_settings(tmp_path, model, rollout__max_new_tokens=512),
            ["max_new_tokens = 512", "context of 512"],
        ),
        (
            rl_settings(tmp_path, model, reward__functions=[needs]),
            ["reward.functions", "'solution'", "data.train"],
        ),
        (rl_settings(tmp_path, tmp_path / "gone/model"), ["gone/model"]),
        (rl_settings(tmp_path, bare), ["bare", "tokenizer"]),
        (rl_settings(tmp_path, unfinished), ["unfinished", "config.json"]),
        (
            rl_settings(tmp_path, model, "old", checkpoint__resume=True),
            ["another model", "num_hidden_layers"],
        ),
        (
            rl_settings(tmp_path, model, "begun", checkpoint__resume=True),
            ["no checkpoint to resume", "begun"],
        ),
        (rl_settings(tmp_path, model, "begun"), ["already holds a run", "checkpoint.resume=true"]),
        (
            rl_settings(tmp_path, model, "new", checkpoint__resume=str(tmp_path / "old")),
            ["is no complete checkpoint", "state.json"],
        ),
    ]
    for settings, words in cases:
        monkeypatch.setattr(
            sys, "argv", ["tunesmith", "rl", str(tmp_path / "none.toml"), *settings]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr().err
        assert ended.value.code == 2, (words, told)
        assert "Traceback" not in told and all(word in told for word in words), (words, told)
        assert len(told) < 1000


def test_supervised_training_names_the_line_too(tmp_path: Path, model: Path) -> None:
    from tunesmith.errors import DataError
    from tunesmith.run import assembly

    data = write_lines(
        tmp_path / "d.jsonl",
        [{"prompt": "a", "completion": "b"}, {"prompt": "a" * 600, "completion": "b"}],
    )
    with pytest.raises(DataError, match=r"d\.jsonl:2: 60\d tokens, the limit is 512"):
        assembly.run_sft(None, sft_settings(tmp_path, model, data__train=str(data)))
    write_lines(tmp_path / "e.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    with pytest.raises(DataError, match=r"e\.jsonl:2"):
        assembly.run_sft(None, sft_settings(tmp_path, model, data__train=str(tmp_path / "e.jsonl")))


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    from tunesmith.errors import ModelError
    from tunesmith.run import assembly

    model = save_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    settings = [s for s in rl_settings(tmp_path, model) if not s.startswith("system.threads")]
    with pytest.raises(ModelError, match="model"):
        assembly.run_rl(None, settings)
    weights.unlink()
    with pytest.raises(ModelError, match="model"):
        assembly.run_rl(None, settings)
