"""Models on the hub: what is sent where, what the card says, and that no failure there costs the
run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import huggingface_hub
import pytest
from huggingface_hub import HfApi, ModelCard

from tests.support.tiny_runs import rl_settings, sft_settings
from tunesmith.errors import ConfigError
from tunesmith.records.interrupts import Interrupted
from tunesmith.run import assembly
from tunesmith.run.assembly.opening import Caller
from tunesmith.run.loop.callbacks import Callbacks
from tunesmith.run.loop.manifest import damages

TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """Takes the calls of the real one, with the real one's arguments and no others."""
    made = create_autospec(HfApi, instance=True)
    made.upload_folder.return_value = MagicMock(commit_url="https://hub/commit/1")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: made)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


@pytest.mark.more
def test_the_last_model_goes_to_a_private_repository_with_its_card(
    tmp_path: Path,
    model: Path,
    api: MagicMock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["tunesmith", "rl", str(tmp_path / "run.toml"), f"model.path='{model}'", "a.b=c/d"],
    )
    outcome = assembly.run_rl(
        None, rl_settings(tmp_path, model, checkpoint__push_to_hub="ann/sums", checkpoint__every=1)
    )
    api.create_repo.assert_called_once_with("ann/sums", private=True, exist_ok=True)
    [call] = api.upload_folder.call_args_list
    assert call.kwargs["repo_id"] == "ann/sums" and call.kwargs["folder_path"] == outcome.checkpoint
    card = ModelCard.load(outcome.checkpoint / "README.md")
    said = card.data.to_dict()
    assert said["library_name"] == "transformers" and {"tunesmith", "grpo"} <= set(said["tags"])
    assert "base_model" not in said, "a directory of this machine is no model of the hub"
    assert "| reward |" in card.text and "train.jsonl" in card.text and "[rollout]" in card.text
    assert "tunesmith rl run.toml" in card.text and "a.b=c/d" in card.text
    assert not any(
        str(folder) in card.text
        for folder in (*tmp_path.parents, *model.parents)
        if len(folder.parts) > 1
    )
    assert damages(outcome.checkpoint.parent) == [], "the card is part of the checkpoint"
    assert "https://hub/commit/1" in capsys.readouterr().out


def test_each_checkpoint_s_model_goes_there_where_that_is_asked_for(
    tmp_path: Path, model: Path, api: MagicMock
) -> None:
    more: dict[str, Any] = {
        "checkpoint__push": "all",
        "checkpoint__hub_private": False,
        "lora__rank": 2,
    }
    said = sft_settings(
        tmp_path, model, train__steps=3, checkpoint__every=1, checkpoint__push_to_hub="a/b", **more
    )
    outcome = assembly.run_sft(None, said)
    api.create_repo.assert_called_once_with("a/b", private=False, exist_ok=True)
    assert [c.kwargs["folder_path"].parent.name for c in api.upload_folder.call_args_list] == [
        f"step-00000{n}" for n in (1, 2, 3)
    ]
    assert ModelCard.load(outcome.checkpoint / "README.md").data.to_dict()["library_name"] == "peft"


def test_the_model_with_which_a_callback_ends_the_run_is_the_last_one(
    tmp_path: Path, model: Path, api: MagicMock
) -> None:
    said = sft_settings(
        tmp_path, model, train__steps=5, checkpoint__every=1, checkpoint__push_to_hub="a/b"
    )
    caller = Caller(callbacks=Callbacks(on_checkpoint=lambda step, _: step < 2))
    outcome = assembly.run_sft(None, said, caller)
    assert outcome.checkpoint.parent.name == "step-000002"
    [call] = api.upload_folder.call_args_list
    assert call.kwargs["folder_path"] == outcome.checkpoint


def test_a_run_that_was_stopped_after_its_last_step_uploads_its_model_when_continued(
    tmp_path: Path, model: Path, api: MagicMock
) -> None:
    said = sft_settings(
        tmp_path,
        model,
        train__steps=2,
        checkpoint__push_to_hub="a/b",
        checkpoint__model_only="last",
    )

    def stop(step: int, _: object) -> None:
        if step == 2:
            raise Interrupted(signal.SIGTERM)

    with pytest.raises(Interrupted):
        assembly.run_sft(None, said, Caller(callbacks=Callbacks(on_step=stop)))
    stopped = tmp_path / "sft/checkpoints/step-000002"
    assert (stopped / "optimizer.safetensors").exists() and not api.upload_folder.call_args_list
    outcome = assembly.run_sft(None, [*said, "checkpoint.resume=true"])
    [call] = api.upload_folder.call_args_list
    assert call.kwargs["folder_path"] == outcome.checkpoint == stopped / "model"
    assert not (stopped / "optimizer.safetensors").exists()


def test_a_push_that_fails_costs_nothing_and_shows_no_token(
    tmp_path: Path, model: Path, api: MagicMock, capsys: pytest.CaptureFixture[str]
) -> None:
    api.upload_folder.side_effect = OSError(f"bad gateway for Bearer {TOKEN}")
    outcome = assembly.run_sft(
        None, sft_settings(tmp_path, model, train__steps=1, checkpoint__push_to_hub="a/b")
    )
    told = capsys.readouterr().out
    assert (
        outcome.checkpoint.exists()
        and "bad gateway" in told
        and f"hf upload a/b {outcome.checkpoint}" in told
    )
    written = [p.read_bytes() for p in outcome.run_dir.rglob("*") if p.is_file()]
    assert TOKEN not in told and not any(TOKEN.encode() in content for content in written)


def test_a_repository_that_cannot_be_written_to_is_refused_before_training(
    tmp_path: Path, model: Path, api: MagicMock
) -> None:
    api.create_repo.side_effect = PermissionError(f"403 for {TOKEN}")
    with pytest.raises(ConfigError, match="push_to_hub") as raised:
        assembly.run_sft(None, sft_settings(tmp_path, model, checkpoint__push_to_hub="a/b"))
    assert TOKEN not in str(raised.value) and "hf auth login" in str(raised.value)
    assert not (tmp_path / "sft/checkpoints").exists()
