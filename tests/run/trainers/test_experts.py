"""Balancing the experts of a mixture: the same for any packing, and kept by checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import SPECIAL
from tests.support.tiny import save_model
from tests.support.training import backend_of, difference, gradient, learner_of, samples_of
from tunesmith.errors import ModelError
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.batch import Batch
from tunesmith.models.causal_lm import CausalLM

OBJECTIVE = SFTObjective()


def saved(folder: Path, model_type: str) -> Path:
    return save_model(folder / model_type, model_type, **SPECIAL[model_type])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_the_loss_depends_on_neither_packing_nor_sharing(tmp_path: Path, model_type: str) -> None:
    batch = Batch.of(samples_of())
    path = saved(tmp_path, model_type)
    plain, _ = gradient(learner_of(backend_of(path)), batch, OBJECTIVE)
    found: list[Any] = []
    for max_tokens, share in ((4096, True), (40, True), (40, False)):
        backend = backend_of(path, router_aux_loss_coef=0.5)
        learner = learner_of(backend, max_tokens, share_prompts=share)
        found.append(gradient(learner, batch, OBJECTIVE)[0])
    assert difference(found[0], plain) > 1e-3
    assert difference(found[1], found[0]) < 1e-5
    assert difference(found[2], found[0]) < 1e-5


def test_metrics_are_of_the_whole_optimizer_batch(tmp_path: Path) -> None:
    batch = Batch.of(samples_of())
    path = saved(tmp_path, "qwen3_moe")
    seen: list[dict[str, float]] = []
    for max_tokens in (4096, 40):
        backend = backend_of(path, router_aux_loss_coef=0.1)
        metrics = learner_of(backend, max_tokens).update(batch, OBJECTIVE)
        seen.append({name: value for name, value in metrics.items() if "experts/" in name})
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
    assert 1 < seen[0]["experts/load_max"] <= 2  # two of four experts
    assert seen[0]["experts/aux_loss"] >= 2


def test_the_loss_makes_loads_more_even(tmp_path: Path) -> None:
    batch = Batch.of(samples_of())
    ends: list[float] = []
    for coef in (0.0, 1.0):
        backend = backend_of(saved(tmp_path, "qwen3_moe"), router_aux_loss_coef=coef)
        learner = learner_of(backend)
        metrics = [learner.update(batch, OBJECTIVE) for _ in range(6)][-1]
        ends.append(metrics["experts/entropy"])
    assert ends[1] > ends[0]


def test_biases_move_by_the_rate_and_are_saved(tmp_path: Path) -> None:
    path = saved(tmp_path, "deepseek_v3")
    batch = Batch.of(samples_of())
    backend = backend_of(path, router_bias_update_rate=0.01)
    learner = learner_of(backend)
    learner.update(batch, OBJECTIVE)
    [router] = backend.model.runner.routers
    bias = router.bias
    assert bias is not None
    moved = bias.clone()
    assert set(moved.abs().mul(100).round().tolist()) <= {0.0, 1.0} and moved.any()
    backend.save(tmp_path / "checkpoint")
    learner.update(batch, OBJECTIVE)
    assert not torch.equal(bias, moved)
    other = backend_of(path, router_bias_update_rate=0.01)
    other.load(tmp_path / "checkpoint")
    [again] = other.model.runner.routers
    assert again.bias is not None and torch.equal(again.bias, moved)
    learner_of(other).update(batch, OBJECTIVE)
    for name, weight in backend.model.module.state_dict().items():
        assert torch.equal(other.model.module.state_dict()[name], weight), name


def test_a_reference_that_follows_the_policy_gets_its_biases(tmp_path: Path) -> None:
    path = saved(tmp_path, "deepseek_v3")
    reference = CausalLM.load(path, dtype=torch.float32)
    backend = backend_of(path, router_bias_update_rate=0.5, reference=reference)
    learner = learner_of(backend)
    batch = Batch.of(samples_of())
    learner.update(batch, OBJECTIVE)
    backend.refresh_reference()
    own = backend.model.module.state_dict()
    for name, weight in reference.module.state_dict().items():
        assert torch.equal(weight, own[name]), name
    assert learner.score(batch).tolist() == learner.score(batch, reference=True).tolist()


@pytest.mark.parametrize(
    ("model_type", "dtype", "option"),
    [
        ("qwen3", torch.float32, "router_aux_loss_coef"),
        ("qwen3_moe", torch.float32, "router_bias_update_rate"),
        ("minimax_m2", torch.bfloat16, "router_bias_update_rate"),
    ],
)
def test_models_that_cannot_be_balanced_so_are_refused(
    tmp_path: Path, model_type: str, dtype: torch.dtype, option: str
) -> None:
    path = save_model(tmp_path / "model", model_type, **SPECIAL.get(model_type, {}))
    with pytest.raises(ModelError) as error:
        backend_of(path, dtype, **{option: 0.1})
    assert f"model.{option}" in error.value.keys
