"""Whole runs that train a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from tests.support.long import again
from tests.support.rank_runs import same
from tests.support.tiny_runs import rl_settings, same_tensors, sft_settings
from tests.support.vision import FAMILIES, save_vision_model, weights_of
from tunesmith.errors import TunesmithError
from tunesmith.plan.facts.model_files import is_of_tower
from tunesmith.run import assembly


def sft_run(folder: Path, model: Path, run: str, tower: str, **changed: Any) -> Path:
    settings = {"data__chat": None, "data__train": str(folder / "sft.jsonl"), "train__steps": 2}
    settings = {**settings, "model__vision_tower": tower, **changed}
    return assembly.run_sft(None, sft_settings(folder, model, run, **settings)).checkpoint


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_asked_for_is_what_changes(picture_folder: Path, model_type: str) -> None:
    model = save_vision_model(picture_folder / "model", model_type)
    before = weights_of(model)
    projector = ("merger", "projector")
    for tower in ("frozen", "projector", "trained"):
        checkpoint = sft_run(picture_folder, model, tower, tower)
        after = weights_of(checkpoint)
        assert before.keys() == after.keys()
        for name in filter(is_of_tower, before):
            changes = (
                tower == "trained" or tower in name or (tower != "frozen" and "merger" in name)
            )
            idle = "vision_tower.head" in name
            assert torch.equal(before[name], after[name]) is not (changes and not idle), name
        AutoModelForImageTextToText.from_pretrained(checkpoint)
        files = [(each / "preprocessor_config.json").read_text() for each in (model, checkpoint)]
        assert files[0] == files[1]
    assert any(word in name for name in before for word in projector)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_tower_learns_at_a_rate_of_its_own(picture_folder: Path, adapted: bool) -> None:
    """The first step of AdamW is as long as its rate; the decoder's is the same."""
    model = save_vision_model(picture_folder / "model")
    before = weights_of(model)
    adapter = {"lora__rank": 2, "lora__save_merged": True} if adapted else {}
    settings = {"train__steps": 1, "train__weight_decay": 0.0, **adapter}
    moves: dict[float, dict[str, float]] = {}
    for ratio in (1.0, 0.1):
        own = {**settings, "model__vision_lr_ratio": ratio}
        path = sft_run(picture_folder, model, f"{ratio}", "projector", **own)
        after = weights_of(path.with_name(f"{path.name}_merged") if adapted else path)
        moves[ratio] = {n: float((after[n] - w).abs().max()) for n, w in before.items()}
    assert any("merger" in name and moved for name, moved in moves[1.0].items())
    for name, moved in moves[1.0].items():
        expected = moved * (0.1 if is_of_tower(name) else 1)
        assert moves[0.1][name] == pytest.approx(expected, rel=1e-2, abs=1e-7), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_rewards_train_the_tower_that_samples(picture_folder: Path, checkpointing: bool) -> None:
    """The ratio is one only if the engine's features are those of the trainer's new weights."""
    model = save_vision_model(picture_folder / "model")
    settings = rl_settings(
        picture_folder,
        model,
        data__chat=None,
        model__vision_tower="trained",
        algorithm__kl__coef=0.1,
        system__gradient_checkpointing=checkpointing,
    )
    outcome = assembly.run_rl(None, settings)
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in outcome.metrics)
    assert all(line["grad_norm"] > 0 for line in outcome.metrics)
    before = weights_of(model)
    after = weights_of(outcome.checkpoint)
    assert not any(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))


RANKS = {"system__trainer_ranks": 2}
ADAPTER: dict[str, Any] = {"data__chat": None, "lora__rank": 4, "train__lr": 1e-3}


@pytest.mark.parametrize(
    ("model_type", "tower"),
    [("gemma3", "trained"), ("qwen3_vl", "projector"), again("qwen2_5_vl", "trained")],
)
def test_a_tower_trained_beside_an_adapter_is_merged_and_loaded_elsewhere(
    picture_folder: Path, model_type: str, tower: str
) -> None:
    model = save_vision_model(picture_folder / "model", model_type)
    adapter = sft_run(picture_folder, model, "run", tower, lora__rank=4, lora__save_merged=True)
    merged = weights_of(adapter.with_name("model_merged"))
    before = weights_of(model)
    assert before.keys() == merged.keys()
    for name in before:
        in_projector = "merger" in name or "projector" in name
        learns = in_projector or tower == "trained" or not is_of_tower(name)
        whole = not (is_of_tower(name) or name.endswith("proj.weight"))
        idle = "vision_tower.head" in name or whole
        assert torch.equal(before[name], merged[name]) is not (learns and not idle), name
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    peft: Any = PeftModel.from_pretrained(loaded, adapter).merge_and_unload()
    want = AutoModelForImageTextToText.from_pretrained(adapter.with_name("model_merged"))
    for name, weight in want.state_dict().items():
        torch.testing.assert_close(peft.state_dict()[name], weight, rtol=1e-6, atol=1e-6)


def test_the_reference_of_an_adapter_has_the_original_tower(picture_folder: Path) -> None:
    """So the first step's KL is zero and the next is not; ratios say that engines see what the
    trainer sees, in its process, in their own, and beside ranks that shard the model."""
    model = save_vision_model(picture_folder / "model")
    shared = {**ADAPTER, "algorithm__kl__coef": 0.1, "model__vision_tower": "trained"}
    shared |= {"lora__targets": ["o_proj"]}
    one = assembly.run_rl(None, rl_settings(picture_folder, model, "one", **shared))
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in one.metrics)
    divergence = [line["ref_kl"] for line in one.metrics]
    assert divergence[0] == pytest.approx(0, abs=1e-6) and divergence[-1] > 1e-6
    places: dict[str, Any] = {
        "sharded": {**RANKS, "system__zero_stage": 3, "system__engines": 2},
        "merged": {"system__engine_process": True, "system__adapter_sync": "merged"},
    }
    for name, place in places.items():
        settings = rl_settings(picture_folder, model, name, **shared, **place)
        same(one, assembly.run_rl(None, settings))


def test_an_adapter_with_a_tower_is_continued_and_resumed(picture_folder: Path) -> None:
    model = save_vision_model(picture_folder / "model", "gemma3")
    shared: dict[str, Any] = {"checkpoint__every": 2, "train__schedule": "constant"}
    shared |= ADAPTER
    whole = sft_run(picture_folder, model, "whole", "projector", train__steps=4, **shared)
    sft_run(picture_folder, model, "half", "projector", train__steps=2, **shared)
    shared["checkpoint__resume"] = "auto"
    half = sft_run(picture_folder, model, "half", "projector", train__steps=4, **shared)
    same_tensors(whole.parent, half.parent)
    continued = {"lora__path": str(whole), "train__lr": 1e-3}
    for name, ranks in (("next", {}), ("ranks", {**RANKS, "system__zero_stage": 3})):
        after = sft_run(picture_folder, model, name, "projector", **continued, **ranks)
        assert any("projector" in each for each in weights_of(after))
    with pytest.raises(TunesmithError, match="vision_tower"):
        sft_run(picture_folder, model, "other", "trained", **continued)
    with pytest.raises(TunesmithError, match="modules_to_save"):
        sft_run(picture_folder, model, "frozen", "frozen", **continued)


@pytest.mark.parametrize(
    "places",
    [
        {**RANKS, "system__zero_stage": 3, "system__engines": 2},
        again({**RANKS, "system__zero_stage": 2}),
        {"system__engine_process": True},
    ],
    ids=["sharded", "stage 2", "engine"],
)
def test_other_processes_train_the_same_tower(picture_folder: Path, places: dict[str, Any]) -> None:
    """A reference, ranks that shard the model, and engines with their own copy."""
    model = save_vision_model(picture_folder / "model")
    shared: dict[str, Any] = {
        "data__chat": None,
        "train__lr": 1e-3,
        "algorithm__kl__coef": 0.1,
        "model__vision_tower": "trained",
    }
    same(
        assembly.run_rl(None, rl_settings(picture_folder, model, "one", **shared)),
        assembly.run_rl(None, rl_settings(picture_folder, model, "two", **shared, **places)),
    )


@pytest.mark.parametrize("stage", [0, again(1), 3])
def test_ranks_with_and_without_images_train_the_same_tower(
    picture_folder: Path, stage: int
) -> None:
    """Most lines have no image, so most micro-batches of a rank have none."""
    lines = (picture_folder / "sft.jsonl").read_text().splitlines()
    plain = ['{"prompt": "what then?", "completion": "nothing"}'] * 10
    (picture_folder / "mixed.jsonl").write_text("\n".join([lines[0], *plain, lines[1]]))
    model = save_vision_model(picture_folder / "model", "gemma3")
    shared: dict[str, Any] = {
        "data__chat": None,
        "data__train": str(picture_folder / "mixed.jsonl"),
        "train__lr": 1e-3,
        "train__batch_size": 4,
        "model__vision_tower": "trained",
        "system__max_tokens_per_microbatch": 96,
    }
    ranks = {**RANKS, "system__zero_stage": stage}
    one = assembly.run_sft(None, sft_settings(picture_folder, model, "one", **shared))
    same(one, assembly.run_sft(None, sft_settings(picture_folder, model, "two", **shared, **ranks)))


def test_a_continued_run_is_bitwise_the_same(picture_folder: Path) -> None:
    model = save_vision_model(picture_folder / "model", "qwen2_5_vl")
    shared = {"checkpoint__every": 2, "train__lr": 1e-3, "train__ema_decay": 0.9}
    whole = sft_run(picture_folder, model, "whole", "trained", train__steps=4, **shared)
    sft_run(picture_folder, model, "half", "trained", train__steps=2, **shared)
    half = sft_run(
        picture_folder,
        model,
        "half",
        "trained",
        train__steps=4,
        checkpoint__resume="auto",
        **shared,
    )
    same_tensors(whole.parent, half.parent)
