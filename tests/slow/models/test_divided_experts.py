"""Ranks that divide the experts of a mixture compute as one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import training
from tests.support.families import SPECIAL
from tests.support.rank_runs import same
from tests.support.sharded_ranks import Ranks
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, same_tensors, sft_settings, untimed
from tunesmith.config.schema import LoraSection
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run import assembly
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend

SAMPLES = training.weighed(training.samples_of(groups=4))
BATCH = Packing.of(SAMPLES, 40)
OTHERS = (
    "mixtral", "qwen2_moe", "granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa",
    "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "minimax_m2", "lfm2_moe", "qwen3_next",
    "qwen3_5_moe_text", "deepseek_v2", "kimi_linear", "gemma4_text", "cohere2_moe", "dots1",
    "exaone_moe", "flex_olmo", "hy_v3", "mellum", "olmoe", "solar_open", "afmoe",
    "axk1", "hunyuan_v1_moe", "laguna", "jamba",
)  # fmt: skip
FAMILIES = (
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"),
    *(pytest.param(family, marks=pytest.mark.long) for family in OTHERS),
)
GEMMA = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
DIVIDED: dict[str, Any] = {
    "system__trainer_ranks": 2,
    "system__zero_stage": 3,
    "system__expert_parallel_size": 2,
}


@contextmanager
def divided(path: Path, stage: int, world: int = 2, **options: Any) -> Generator[Ranks]:
    ranks = Ranks(path, world, stage, size=2, divides=True, **options)
    try:
        yield ranks
    finally:
        ranks.close()


def saved(folder: Path, family: str) -> Path:
    more = GEMMA | {"moe_intermediate_size": 32} if family == "gemma4_text" else {}
    return save_model(folder / "model", family, **SPECIAL[family], **more)


def alone(
    path: Path, dtype: torch.dtype = torch.float32, adapter: int | None = None, **options: Any
) -> TorchBackend[CausalLM]:
    settings = AdamWSettings(max_grad_norm=1.0, weight_decay=0.1)
    model = CausalLM.load(path, dtype=dtype)
    if adapter is not None:
        torch.manual_seed(0)
        attach(model, LoraSection(rank=adapter))
    return TorchBackend(model, settings, CausalLM.predict, **options)


def check_gradients(found: Any, one: TorchBackend[CausalLM], most: float = 1e-5) -> None:
    """Of each parameter by itself; and of the loss, of which each rank has its part."""
    loss = one.forward_backward(BATCH, SFTObjective())["loss"]
    parts = {metrics["loss"] for metrics, _ in found}  # ranks that share a sequence have the same
    assert sum(parts) == pytest.approx(loss, rel=most)
    theirs = found[0][1]
    masters = one.optimizer.masters.items()
    ours = {name: m.grad for name, m in masters if m.grad is not None}
    assert theirs.keys() == ours.keys()
    for name, gradient in ours.items():
        assert training.difference({name: theirs[name]}, {name: gradient}) < most, name


def check_steps(found: Any, one: TorchBackend[CausalLM]) -> None:
    """Gradient norms and weights after three steps."""
    (norms, weights), *_ = found
    expected: list[float] = []
    for _ in range(3):
        one.forward_backward(BATCH, SFTObjective())
        expected.append(one.step(1e-2)["grad_norm"])
    assert norms == pytest.approx(expected, rel=1e-4)
    for name, weight in one.model.module.state_dict().items():
        assert float((weights[name] - weight).abs().mean()) < 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    path = saved(tmp_path, family)
    with divided(path, 3) as ranks:
        check_gradients(ranks("gradient", BATCH), alone(path))


@pytest.mark.parametrize("stage", [1, 3])
def test_an_adapter_beside_divided_experts_has_the_gradients_of_one_process(
    tmp_path: Path, stage: int
) -> None:
    """On attention, and on the experts that all tokens share; routed experts are frozen."""
    path = saved(tmp_path, "qwen2_moe")
    one = alone(path, adapter=4)
    with divided(path, stage, adapter=4) as ranks:
        (_, theirs), *_ = ranks("gradient", BATCH)
        ranks("backend.give_up")
        (found, _), *_ = ranks("train", BATCH)
    expected: list[float] = []
    for step in range(3):
        one.forward_backward(BATCH, SFTObjective())
        if step == 0:
            masters = one.optimizer.masters.items()
            ours = {name: m.grad for name, m in masters if m.grad is not None}
            assert training.difference(theirs, ours) < 1e-5
            assert any("shared_expert." in name for name in ours)
        expected.append(one.step(1e-2)["grad_norm"])
    assert found == pytest.approx(expected, rel=1e-4)


def test_ranks_that_share_sequences_divide_experts_too(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3_moe")
    with divided(path, 3, sequence=2) as ranks:
        check_gradients(ranks("gradient", BATCH), alone(path))


def test_gradients_in_bfloat16_and_with_memory_saved(tmp_path: Path) -> None:
    """Layers are computed again, activations and the optimizer are in host memory, and float32
    masters sum gradients. Each rank keeps half of the experts, in bfloat16."""
    path = saved(tmp_path, "qwen3_moe")
    memory: dict[str, Any] = {
        "gradient_checkpointing": True,
        "offload": True,
        "offload_activations": True,
    }
    one = alone(path, torch.bfloat16, router_aux_loss_coef=0.5)
    memory["router_aux_loss_coef"] = 0.5
    with divided(path, 1, dtype=torch.bfloat16, **memory) as ranks:
        check_gradients(ranks("gradient", BATCH), one, most=3e-2)


def test_an_expert_without_tokens_has_a_gradient_of_zeros(tmp_path: Path) -> None:
    """Biases send all tokens to the experts of the first rank; weight decay acts on the others."""
    path = saved(tmp_path, "deepseek_v3")
    model = CausalLM.load(path)
    for router in model.runner.routers:
        assert router.bias is not None
        router.bias.copy_(torch.tensor([10.0, 10.0, 0.0, 0.0]))
    model.save(path)
    with divided(path, 2) as ranks:
        check_gradients(ranks("gradient", BATCH), alone(path))
        ranks("backend.give_up")
        check_steps(ranks("train", BATCH), alone(path))


def test_copies_balance_their_experts_and_continue_anywhere(tmp_path: Path) -> None:
    """Two copies of two ranks each; their checkpoint continues bit by bit, and in one process."""
    path = saved(tmp_path, "deepseek_v3")
    options: dict[str, Any] = {
        "router_aux_loss_coef": 0.5,
        "router_bias_update_rate": 0.01,
        "ema_decay": 0.5,
    }
    with divided(path, 3, world=4, **options) as ranks:
        check_steps(ranks("train", BATCH), alone(path, **options))
        ranks("backend.save", tmp_path / "saved")
        (_, expected), *_ = ranks("train", BATCH, 1)
        ranks("backend.load", tmp_path / "saved")
        (_, again), *_ = ranks("train", BATCH, 1)
    assert all(again[name].equal(weight) for name, weight in expected.items())
    one = alone(path, **options)
    one.load(tmp_path / "saved")
    one.forward_backward(BATCH, SFTObjective())
    one.step(1e-2)
    for name, weight in one.model.module.state_dict().items():
        torch.testing.assert_close(weight.double(), expected[name].double(), rtol=1e-4, atol=1e-5)
    assert CausalLM.load(tmp_path / "saved" / "ema").module.num_parameters() > 0


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_runs_out_of_memory_stops_all(tmp_path: Path, backward: bool) -> None:
    path = saved(tmp_path, "qwen3_moe")
    uneven = Packing.of(SAMPLES, 60)
    most = max(forest.num_tokens for forest in uneven.for_rank(1, 2).forests) - 1
    with divided(path, 3) as ranks:
        small = Packing.of(SAMPLES, 24)
        found = ranks("after_failures", uneven, max(most, 25), small, backward=backward)
    assert [failed for failed, _ in found] == [True, True]
    one = alone(path)
    one.forward_backward(BATCH, SFTObjective())
    masters = one.optimizer.masters.items()
    ours = {name: m.grad for name, m in masters if m.grad is not None}
    assert training.difference(found[0][1], ours) < 1e-5


def test_a_reinforced_run_ends_as_one_process(tmp_path: Path) -> None:
    """With a critic and a reference, and experts replayed from an engine that gets whole weights. The saved
    model is whole."""
    path = saved(tmp_path, "qwen3_moe")
    changed: dict[str, Any] = {
        "algorithm__name": "ppo",
        "algorithm__routing_replay": "sampler",
        "algorithm__kl__coef": 0.1,
        "train__lr": 1e-3,
    }
    one = assembly.run_rl(None, rl_settings(tmp_path, path, "one", **changed))
    changed |= DIVIDED
    same(one, assembly.run_rl(None, rl_settings(tmp_path, path, "two", **changed)))


def test_a_resumed_run_with_an_adapter_ends_as_one_process(tmp_path: Path) -> None:
    """With the base as the reference; the engine gets the adapter, or all weights with it merged
    in."""
    path = saved(tmp_path, "qwen3_moe")
    changed: dict[str, Any] = {
        "algorithm__kl__coef": 0.1,
        "lora__rank": 4,
        "train__lr": 1e-3,
        "train__schedule": "constant",
        "checkpoint__every": 1,
    }
    one = assembly.run_rl(None, rl_settings(tmp_path, path, "one", **changed))
    changed |= DIVIDED
    for sync in ("adapter", "merged"):
        changed |= {"system__adapter_sync": sync, "system__hybrid": False}
        assembly.run_rl(None, rl_settings(tmp_path, path, sync, **changed, train__steps=2))
        again = rl_settings(tmp_path, path, sync, **changed, checkpoint__resume=True)
        same(one, assembly.run_rl(None, again))


def test_ranks_of_torchrun_divide_experts(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    path = saved(tmp_path, "qwen3_moe")
    one = assembly.run_sft(None, sft_settings(tmp_path, path, "one"))
    divided = {name: value for name, value in DIVIDED.items() if name != "system__trainer_ranks"}
    settings = sft_settings(tmp_path, path, "launched", **divided)
    (tmp_path / "run.toml").touch()
    launcher = (str(torchrun), "--nproc-per-node", "2", "-m", "tunesmith", "sft", "run.toml")
    subprocess.run([*launcher, *settings], cwd=tmp_path, check=True, timeout=300)
    launched = tmp_path / "launched"
    checkpoint = launched / one.checkpoint.relative_to(one.run_dir)
    same(one, assembly.RunResult(launched, checkpoint, [], {}))


def test_a_run_is_resumed_bitwise(tmp_path: Path) -> None:
    path = saved(tmp_path, "gpt_oss")
    changed: dict[str, Any] = {"checkpoint__every": 1, "train__schedule": "constant"} | DIVIDED
    changed["train__steps"] = 3
    whole = assembly.run_sft(None, sft_settings(tmp_path, path, "whole", **changed))
    assembly.run_sft(None, sft_settings(tmp_path, path, "parts", **changed | {"train__steps": 2}))
    changed |= {"checkpoint__resume": True}
    parts = assembly.run_sft(None, sft_settings(tmp_path, path, "parts", **changed))
    same_tensors(whole.checkpoint, parts.checkpoint)
    seen = [
        [(line["loss"], line["grad_norm"]) for line in untimed(run.run_dir / "metrics.jsonl")]
        for run in (whole, parts)
    ]
    assert seen[0] == seen[1] and len(seen[0]) == 3
