"""What the backward pass has of the forward pass: the gradient stays the same bit by bit, and the memory falls."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import training
from tiny import save_model
from tunesmith.algorithms.objective import SFTObjective
from tunesmith.backends.torch import TorchBackend
from tunesmith.config.load import load_config
from tunesmith.config.schema import LoraSection, SFTConfig
from tunesmith.data.forest import Packing
from tunesmith.errors import ConfigError, ModelError
from tunesmith.models import adapters
from tunesmith.models.activations import compute_again
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.sharding import decoder_layers
from tunesmith.plan.cost import recomputed

LAYERS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", "qwen3", num_hidden_layers=LAYERS)


def backend_of(path: Path, kind: str, **options: Any) -> TorchBackend[CausalLM]:
    """A backend on the lean decoder, on the Hugging Face modules, with an adapter, or in bfloat16."""
    torch.manual_seed(0)
    model = CausalLM.load(path, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind == "lora":
        adapters.attach(model, LoraSection(rank=4, alpha=8.0, targets="all-linear"))
    if kind == "hugging face":
        model.lean = None
    return TorchBackend(model, training.AdamWSettings(), CausalLM.predict, ema_decay=0.9, **options)


def gradient(backend: TorchBackend[CausalLM]) -> dict[str, Tensor]:
    """Of two micro-batches."""
    batch = Packing.of(training.weighed(training.samples_of()), 60)
    assert len(batch) >= 2
    backend.forward_backward(batch, SFTObjective())
    return {name: m.grad.clone() for name, m in backend.optimizer.masters.items() if m.grad is not None}


KINDS = pytest.mark.parametrize("kind", ["lean", "hugging face", "lora", "bfloat16"])


@KINDS
def test_the_gradient_is_the_same_for_every_share(path: Path, kind: str) -> None:
    expected = gradient(backend_of(path, kind))
    for share in (0.25, 0.5, 0.75, True):
        found = gradient(backend_of(path, kind, gradient_checkpointing=share))
        assert found.keys() == expected.keys()
        assert all(found[name].equal(grad) for name, grad in expected.items()), share


def saved(backend: TorchBackend[CausalLM]) -> int:
    """Bytes that the backward pass is given, each storage once."""
    sizes: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        backend.passes.predict(training.forest_of(training.samples_of()))
    weights = {p.untyped_storage().data_ptr() for p in backend.model.module.parameters()}
    return sum(t.untyped_storage().nbytes() for place, t in sizes.items() if place not in weights)


@pytest.mark.parametrize("kind", ["lean", "hugging face"])
def test_each_layer_that_is_computed_again_keeps_its_input_only(path: Path, kind: str) -> None:
    counts: list[int] = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        backend = backend_of(path, kind, gradient_checkpointing=share)
        backend.model.module.train()
        counts.append(saved(backend))
    steps = [before - after for before, after in pairwise(counts)]
    assert steps == pytest.approx([steps[0]] * 4, rel=0.1) and LAYERS * steps[0] > 0.6 * counts[0]


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 28, 80])
def test_the_layers_are_evenly_spread_and_the_last_one_is_kept(layers: int) -> None:
    assert not any(recomputed(layers, 0)) and all(recomputed(layers, 1))
    for count in range(1, layers):
        chosen = recomputed(layers, count / layers)
        assert sum(chosen) == count and not chosen[-1]
        for length in range(1, layers):
            windows = [sum(chosen[start : start + length]) for start in range(layers - length + 1)]
            assert max(windows) - min(windows) <= 1
    assert sum(recomputed(layers, 1e-9)) == 1 and sum(recomputed(layers, 1 - 1e-9)) == max(1, layers - 1)


def test_layers_that_have_no_switch_cannot_be_chosen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = CausalLM.load(path).module
    compute_again(module, 0.5)
    assert [layer.gradient_checkpointing for layer in decoder_layers(module)] == [True, False, True, False]
    monkeypatch.setattr("tunesmith.models.activations.GradientCheckpointingLayer", int)
    compute_again(module, 1.0)
    with pytest.raises(ModelError, match=r"0\.5.*true or false"):
        compute_again(module, 0.5)


@pytest.mark.parametrize("value", ["1.5", "-0.5", '"half"'])
def test_other_shares_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing.*true or false or a number above 0 and below 1"):
        load_config(SFTConfig, None, ["model.path=m", "data.train=d", f"system.gradient_checkpointing={value}"])
