"""Mixtures of experts on ranks that shard the model or share sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

BATCH = Packing.of(training.weighed(training.samples_of(groups=4)), 40)
BALANCED = {"router_aux_loss_coef": 0.5}


def alone(path: Path, dtype: torch.dtype, **options: Any) -> TorchBackend[CausalLM]:
    """One process, one expert after the other."""
    loaded = CausalLM.load(path, dtype=dtype, experts="eager")
    settings = AdamWSettings(max_grad_norm=1.0, weight_decay=0.1)
    return TorchBackend(loaded, settings, CausalLM.predict, **options)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_a_loop_in_one_process(
    tmp_path: Path, dtype: torch.dtype, most: float
) -> None:
    """With weights sharded, layers computed again, a balancing loss and, in bfloat16, float32
    master weights."""
    path = save_model(tmp_path / "model", "qwen3_moe", **SPECIAL["qwen3_moe"])
    ranks = Ranks(path, 2, 3, dtype=dtype, gradient_checkpointing=True, **BALANCED)
    try:
        [(_, theirs), *_] = ranks("gradient", BATCH)
    finally:
        ranks.close()
    one = alone(path, dtype, **BALANCED)
    one.forward_backward(BATCH, SFTObjective())
    ours = {name: m.grad for name, m in one.optimizer.masters.items() if m.grad is not None}
    assert training.difference(theirs, ours) < most


def test_ranks_that_share_sequences_balance_as_one_process(tmp_path: Path) -> None:
    """Biases move alike on all ranks, and fillers count nothing."""
    path = save_model(tmp_path / "model", "deepseek_v3", **SPECIAL["deepseek_v3"])
    options = BALANCED | {"router_bias_update_rate": 0.01}
    ranks = Ranks(path, 2, 3, sequence=2, **options)
    try:
        [(norms, weights), *_] = ranks("train", BATCH)
    finally:
        ranks.close()
    one = alone(path, torch.float32, **options)
    expected: list[float] = []
    for _ in range(3):
        one.forward_backward(BATCH, SFTObjective())
        expected.append(one.step(1e-2)["grad_norm"])
    assert norms == pytest.approx(expected, rel=1e-4)
    state = one.model.module.state_dict()
    for name, weight in state.items():
        assert float((weights[name] - weight).abs().mean()) < 1e-6, name
    assert any(state[name].any() for name in state if name.endswith("e_score_correction_bias"))
