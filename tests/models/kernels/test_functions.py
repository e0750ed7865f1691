"""Compiled functions are found by a door: training works without them, and with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import training
from tests.support.tiny import save_model
from tunesmith.config.doors import Door
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels import functions, lean_ops
from tunesmith.run.trainers.torch import TorchBackend


def doors_lead_to(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    door = Door[functions.Functions]("functions-of-a-test", place)
    monkeypatch.setattr(functions, "FUNCTIONS", door)


def trained(path: Path) -> tuple[Any, dict[str, Tensor]]:
    model = CausalLM.load(path, dtype=torch.bfloat16)
    backend = TorchBackend(model, training.AdamWSettings(), CausalLM.predict)
    batch = Packing.of(training.weighed(training.samples_of()), 60)
    metrics = backend.forward_backward(batch, SFTObjective())
    return (metrics, backend.step(1e-2)), model.module.state_dict()


def test_training_without_the_compiled_functions_is_that_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "model", "qwen3")
    functions.allow(False)
    expected, weights = trained(path)
    functions.allow(True)
    doors_lead_to(monkeypatch, "tunesmith.models.hidden:Functions")
    assert functions.which(lambda _: True) is None
    metrics, ours = trained(path)
    assert metrics == expected
    assert all(weights[name].equal(weight) for name, weight in ours.items())


class Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        del ctx
        return x / 2


class Mine:
    """Has a norm for float64 and nothing else."""

    RmsNorm = Halving

    def fits(self, *tensors: Tensor) -> bool:
        return tensors[0].dtype == torch.float64


def test_functions_from_outside_compute_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    doors_lead_to(monkeypatch, f"{__name__}:MINE")
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    weight = torch.ones(2, dtype=torch.float64)
    assert lean_ops.rms_norm(x, weight, 0.0, False).tolist() == [[1.5, 2.0]]
    plain = lean_ops.rms_norm(x.float(), weight.float(), 0.0, False)
    assert plain[0].tolist() == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])


MINE = Mine()
