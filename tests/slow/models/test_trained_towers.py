"""A vision tower that is trained: its gradients, its features in engines, and what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.families import assert_same_gradients, gradients, logprobs
from tests.support.training import forest_of
from tests.support.vision import (
    FAMILIES,
    load_vision_model,
    one_by_one,
    picture,
    samples_with_images,
    save_vision_model,
)
from tunesmith.config.schema import LoraSection
from tunesmith.models.adapters import attach
from tunesmith.models.parallel.activations import compute_again
from tunesmith.plan.cost.tower import trained_tower
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.model_files import is_of_tower
from tunesmith.types import VisionTower


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gradients_of_all_weights_equal_those_of_one_sequence_at_a_time(
    tmp_path: Path, model_type: str
) -> None:
    path = save_vision_model(tmp_path / "m", model_type)
    pictures = [picture(0), picture(1), picture(2, 112, 28)]
    model, vocabulary = load_vision_model(path, pictures, tower="trained")
    batch = samples_with_images(vocabulary)
    module, want = one_by_one(path, vocabulary, batch)
    want_gradients = gradients(module, want)
    assert model.vision is not None
    passes: list[object] = []
    model.vision.tower.register_forward_pre_hook(lambda *_: passes.append(None))  # pyright: ignore
    got, _ = logprobs(model, forest_of(batch))
    assert len(passes) == len(pictures)  # an image that several samples have is seen once
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    own = gradients(model, got)
    assert any(map(is_of_tower, want_gradients))
    idle = [own.pop(name) for name in own.keys() - want_gradients.keys()]  # a head without a use
    assert not any(gradient.any() for gradient in idle)
    assert_same_gradients(own, want_gradients, 1e-4)


@pytest.mark.parametrize(
    ("model_type", "tower"), [("gemma3", "trained"), ("qwen3_vl", "projector")]
)
def test_beside_an_adapter_a_tower_learns_as_without_and_the_reference_has_the_original(
    tmp_path: Path, model_type: str, tower: VisionTower
) -> None:
    path = save_vision_model(tmp_path / "m", model_type)
    pictures = [picture(0), picture(1), picture(2, 112, 28)]
    model, vocabulary = load_vision_model(path, pictures, tower=tower)
    adapter = attach(model, LoraSection(rank=4))
    batch = samples_with_images(vocabulary)
    module, want = one_by_one(path, vocabulary, batch)
    want_gradients = gradients(module, want)
    got, _ = logprobs(model, forest_of(batch))
    own = gradients(model, got)
    towers = {
        n.replace(".modules_to_save.default", ""): g for n, g in own.items() if "lora_" not in n
    }
    wanted = {n: g for n, g in want_gradients.items() if n in towers}
    assert any("merger" in name or "projector" in name for name in wanted)
    assert all(not gradient.any() for n, gradient in towers.items() if n not in wanted)
    assert_same_gradients({n: towers[n] for n in wanted}, wanted, 1e-4)
    with torch.no_grad():
        for _, weight in adapter.own_weights():
            weight.add_(torch.randn_like(weight) * 0.05)
        learnt, _ = logprobs(model, forest_of(batch))
        with adapter.reference():
            again, _ = logprobs(model, forest_of(batch))
    torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(learnt, want, atol=1e-3)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_tower_saves_for_the_backward_pass_is_planned(
    tmp_path: Path, model_type: str, narrow: bool, again: bool
) -> None:
    path = save_vision_model(tmp_path / "m", model_type)
    model, vocabulary = load_vision_model(path, [picture(0, 280, 280)], tower="trained")
    vision = model.vision
    facts = read_model_facts(path)
    assert vision is not None and facts is not None and facts.tower is not None
    if narrow:
        model.module.bfloat16()
        vision.dtype = torch.bfloat16
    model.module.train()
    if again:
        compute_again(model.module, 1.0)
    weights = {weight.data_ptr() for weight in model.module.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor
        return tensor

    (image,) = vocabulary.rows.all
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vision.features(image)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / len(image)
    planned = trained_tower(facts, facts.tower, 2 if narrow else 4, "trained")
    ratio = (planned.again if again else planned.kept) / measured
    assert 0.98 < ratio < 1.25
