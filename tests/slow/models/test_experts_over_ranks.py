"""Mixtures of experts on ranks that shard the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import training
from tests.support.families import SPECIAL
from tests.support.sharded_ranks import Ranks
from tests.support.tiny import save_model
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_model(folder / "model", "qwen3_moe", **SPECIAL["qwen3_moe"])


@pytest.fixture(params=TOLERANCE, ids=str)
def ranks(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, torch.dtype]]:
    started = Ranks(model, 2, 3, dtype=request.param, gradient_checkpointing=True)
    yield started, request.param
    started.close()


def alone(path: Path, dtype: torch.dtype) -> TorchBackend[CausalLM]:
    """One process, one expert after the other."""
    loaded = CausalLM.load(path, dtype=dtype, experts="eager")
    return TorchBackend(loaded, AdamWSettings(max_grad_norm=1.0), CausalLM.predict)


def test_gradients_are_those_of_a_loop_in_one_process(
    model: Path, ranks: tuple[Ranks, torch.dtype]
) -> None:
    """With weights sharded, layers computed again and, in bfloat16, float32 master weights."""
    started, dtype = ranks
    batch = Packing.of(training.weighed(training.samples_of(groups=4)), 40)
    [(_, theirs), *_] = started("gradient", batch)
    one = alone(model, dtype)
    one.forward_backward(batch, SFTObjective())
    ours = {name: m.grad for name, m in one.optimizer.masters.items() if m.grad is not None}
    assert training.difference(theirs, ours) < TOLERANCE[dtype]
