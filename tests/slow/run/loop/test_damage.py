"""Damage is noticed and named: in checkpoints, in models, in numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.support.tiny import save_model
from tests.support.tiny_rewards import save_reward_model
from tests.support.tiny_runs import rl_settings, same_tensors, sft_settings, tensors
from tunesmith.cli.main import app
from tunesmith.errors import CheckpointError, DivergedError, ModelError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.score_model import ScoreModel
from tunesmith.run import assembly
from tunesmith.run.loop.checkpoint import Checkpoints, read_state
from tunesmith.run.loop.manifest import damages
from tunesmith.run.trainers.torch import TorchBackend


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, list[str]]:
    """A run with checkpoints of steps 1 and 2, and its settings."""
    folder = tmp_path_factory.mktemp("finished")
    said = sft_settings(folder, model, train__steps=2, checkpoint__every=1, train__ema_decay=0.9)
    return assembly.run_sft(None, said).run_dir, said


def flip(path: Path, place: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def zero_tail(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def added(path: Path) -> None:
    shutil.copy(path, path.with_name("more.safetensors"))


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("model/model.safetensors", flip, "model/model.safetensors"),
        ("model/model.safetensors", added, "model/more.safetensors"),
        ("optimizer.safetensors", zero_tail, "optimizer.safetensors"),
        ("ema/model.safetensors", flip, "ema/model.safetensors"),
        ("ema/config.json", Path.unlink, "ema/config.json"),
        ("model/config.json", lambda p: p.write_text(""), "model/config.json"),
        ("state.json", lambda p: p.write_text(p.read_text().replace("1", "2")), "state.json"),
        ("manifest.json", lambda p: flip(p, 30), "manifest.json"),
        ("manifest.json", lambda p: p.write_text("[1]"), "manifest.json"),
    ],
)
def test_a_damaged_file_is_named_and_a_whole_checkpoint_offered(
    tmp_path: Path,
    finished: tuple[Path, list[str]],
    name: str,
    damage: Callable[[Path], Any],
    named: str,
) -> None:
    run_dir, said = finished
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    newest = Checkpoints(run / "checkpoints", 2).newest()
    assert newest is not None and damages(newest) == []
    damage(newest / name)
    here = [word for word in said if not word.startswith("run_dir=")] + [
        f'run_dir="{run}"',
        "train.steps=3",
    ]
    for resume in ("true", '"auto"', f'"{newest}"'):
        with pytest.raises(CheckpointError) as raised:
            assembly.run_sft(None, [*here, f"checkpoint.resume={resume}"])
        assert named in str(raised.value) and str(run / "checkpoints/step-000001") in str(
            raised.value
        )
    outcome = assembly.run_sft(None, [*here, f'checkpoint.resume="{run}/checkpoints/step-000001"'])
    assert outcome.checkpoint.parent.name == "step-000003"


def test_the_command_says_what_is_whole(tmp_path: Path, finished: tuple[Path, list[str]]) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    found = CliRunner().invoke(app, ["check", str(run)])
    assert found.exit_code == 0 and found.output.count("whole") == 2
    flip(run / "checkpoints/step-000002/model/model.safetensors")
    found = CliRunner().invoke(app, ["check", str(run)])
    assert found.exit_code == 2 and "model/model.safetensors" in found.output
    assert CliRunner().invoke(app, ["check", str(run / "checkpoints/step-000001")]).exit_code == 0
    assert CliRunner().invoke(app, ["check", str(tmp_path)]).exit_code == 2


def test_a_checkpoint_without_its_checksums_is_refused(
    tmp_path: Path, finished: tuple[Path, list[str]]
) -> None:
    run_dir, said = finished
    old = shutil.copytree(run_dir / "checkpoints/step-000001", tmp_path / "step-000001")
    (old / "manifest.json").unlink()
    here = [word for word in said if not word.startswith("run_dir=")] + [
        f'run_dir="{tmp_path / "on"}"'
    ]
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        assembly.run_sft(None, [*here, f'checkpoint.resume="{old}"'])


def changed(
    model: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any
) -> Path:
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**settings, **config}))
    return to


def test_weights_that_are_missing_or_too_many_are_refused_by_name(
    tmp_path: Path, model: Path
) -> None:
    cases: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], dict[str, Any], str]] = [
        ("layers", dict.copy, {"num_hidden_layers": 9}, "model.layers.2."),
        ("fewer", dict.copy, {"num_hidden_layers": 1}, "model.layers.1."),
        ("norm", lambda w: w.pop("model.norm.weight"), {}, "model.norm.weight"),
        ("head", lambda w: w.pop("lm_head.weight"), {}, "lm_head.weight"),
        ("more", lambda w: w.update(other=torch.zeros(1)), {}, "'other'"),
    ]
    for name, change, config, named in cases:
        broken = changed(model, tmp_path / name, change, **config)
        with pytest.raises(ModelError) as raised:
            CausalLM.load(broken)
        assert named in str(raised.value)


def test_weights_that_are_rightly_missing_are_not(tmp_path: Path, model: Path) -> None:
    tied = save_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    CausalLM.load(tied)
    ScoreModel.load(model)  # a new score head in the place of the vocabulary's
    reward_model = save_reward_model(tmp_path / "rm")
    ScoreModel.load(reward_model)
    headless = changed(reward_model, tmp_path / "headless", lambda w: w.pop("score.weight"))
    with pytest.raises(ModelError, match=r"score\.weight"):
        ScoreModel.load(headless)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        CausalLM.load(reward_model)


def test_an_adapter_that_lacks_weights_is_refused(tmp_path: Path, model: Path) -> None:
    first = assembly.run_sft(None, sft_settings(tmp_path, model, train__steps=1, lora__rank=2))
    weights = load_file(first.checkpoint / "adapter_model.safetensors")
    gone = sorted(weights)[0]
    del weights[gone]
    save_file(weights, first.checkpoint / "adapter_model.safetensors")
    again = sft_settings(tmp_path, model, "again", lora__path=str(first.checkpoint), train__steps=1)
    with pytest.raises(ModelError) as raised:
        assembly.run_sft(None, again)
    assert gone in str(raised.value)


@pytest.mark.parametrize("lr", [1e39, 1e308, float("nan")])
def test_weights_that_are_not_finite_never_become_a_checkpoint(
    tmp_path: Path, model: Path, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come of the last step, after which nothing else would look at them."""
    monkeypatch.setattr(
        "tunesmith.run.assembly.learners.learning_rate",
        lambda step, **_: lr if step == 2 else 1e-3,
    )
    with pytest.raises(DivergedError, match="is not finite") as raised:
        assembly.run_sft(None, sft_settings(tmp_path, model, train__steps=3, checkpoint__every=1))
    assert raised.value.exit_code == 2
    saved = Checkpoints(tmp_path / "sft/checkpoints", 2)
    assert saved.steps() == [1, 2]
    assert all(t.isfinite().all() for t in tensors(saved.path(2)).values())


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The gradient is not finite at these optimizer steps."""
    original = TorchBackend.step

    def step(self: TorchBackend[Any], lr: float) -> dict[str, float]:
        if self.optimizer_steps + 1 in steps:
            next(m for m in self.optimizer.masters.values() if m.grad is not None).grad.fill_(
                float("nan")
            )
        return original(self, lr)

    monkeypatch.setattr(TorchBackend, "step", step)


@pytest.mark.parametrize(
    ("steps", "ends_at"),
    [({3, 5, 6}, None), ({1}, 1), ({3, 4, 5}, 5)],
    ids=["rare", "the first", "three in a row"],
)
def test_rare_gradients_that_are_not_finite_are_skipped_and_others_end_the_run(
    tmp_path: Path,
    model: Path,
    steps: set[int],
    ends_at: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    poison(monkeypatch, steps)
    said = sft_settings(tmp_path, model, checkpoint__every=1, checkpoint__keep=9)
    if ends_at is None:
        assembly.run_sft(None, said)
        assert capsys.readouterr().out.count("was skipped") == 3
        return
    with pytest.raises(DivergedError, match=f"optimizer step {ends_at}"):
        assembly.run_sft(None, said)
    saved = Checkpoints(tmp_path / "sft/checkpoints", 9)
    assert saved.steps() == list(range(1, ends_at))
    assert all(
        t.isfinite().all() for step in saved.steps() for t in tensors(saved.path(step)).values()
    )


def test_a_model_without_its_optimizer_is_no_place_to_go_on_from(
    tmp_path: Path, model: Path
) -> None:
    said = sft_settings(
        tmp_path, model, train__steps=2, checkpoint__every=1, checkpoint__model_only="last"
    )
    outcome = assembly.run_sft(None, said)
    first, last = (outcome.run_dir / f"checkpoints/step-00000{n}" for n in (1, 2))
    assert (first / "optimizer.safetensors").exists() and not (
        last / "optimizer.safetensors"
    ).exists()
    assert read_state(last)["finished"] and damages(last) == []
    with pytest.raises(CheckpointError, match="model_only"):
        assembly.run_sft(None, [*said, "checkpoint.resume=true", "train.steps=3"])
    assembly.run_sft(
        None, [*said, f'checkpoint.resume="{first}"', "checkpoint.model_only=true", "train.steps=3"]
    )
    assert not (outcome.run_dir / "checkpoints/step-000003/optimizer.safetensors").exists()


def test_a_run_s_directory_stands_for_its_newest_model(
    tmp_path: Path, finished: tuple[Path, list[str]], model: Path
) -> None:
    said = rl_settings(tmp_path, finished[0], train__steps=1)
    outcome = assembly.run_rl(None, said)
    resolved = json.loads((outcome.run_dir / "resolved.json").read_text())["settings"]
    assert resolved["model.path"]["value"] == str(finished[0] / "checkpoints/step-000002/model")
    assert str(model) not in resolved["model.path"]["value"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The last checkpoint of a run of four steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return assembly.run_sft(
        None, sft_settings(folder, model, train__steps=4, checkpoint__every=1)
    ).checkpoint


@pytest.mark.parametrize(
    "deleted", ["sft/metrics.jsonl", "sft", "sft/checkpoints", "own", "examples.jsonl"]
)
def test_a_run_goes_on_without_what_is_deleted_under_it(
    deleted: str,
    undisturbed: Path,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Metrics say that they begin again, and the last checkpoint is as if nothing had happened."""
    from tunesmith.run.loop.session import Session

    original = Session.finish_step

    def finish_step(self: Session, *args: Any) -> None:
        original(self, *args)
        if self.step == 2:
            path = tmp_path / deleted
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    monkeypatch.setattr(Session, "finish_step", finish_step)
    own = shutil.copytree(model, tmp_path / "own")
    outcome = assembly.run_sft(
        None, sft_settings(tmp_path, own, train__steps=4, checkpoint__every=1)
    )
    same_tensors(undisturbed, outcome.checkpoint)
    assert AutoTokenizer.from_pretrained(outcome.checkpoint)("ab")["input_ids"]
    lines = [json.loads(line) for line in (tmp_path / "sft/metrics.jsonl").read_text().splitlines()]
    again = deleted in ("sft", "sft/metrics.jsonl")
    assert [line["step"] for line in lines] == ([3, 4] if again else [1, 2, 3, 4])
    assert ("was deleted or replaced" in capsys.readouterr().out) == again
