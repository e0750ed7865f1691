"""What a plan counts where ranks divide the experts of a mixture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_runs import resolved
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.copies import copy_bytes
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.price import price
from tunesmith.plan.cost.step_work import step_work
from tunesmith.plan.facts.model import ModelFacts, facts_of
from tunesmith.plan.plan import AnyPlan

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
"""Qwen3-30B-A3B."""
ROUTED = 48 * 128 * 3 * 2048 * 768
RANKS = 8


def qwen() -> ModelFacts:
    facts = facts_of(QWEN)
    assert facts is not None
    return replace(facts, parameters=facts.estimated)


def planned(folder: Path, *settings: str) -> AnyPlan:
    data = ("data.max_tokens=4096", "train.batch_size=64")
    return resolved(folder, "sft", QWEN, "8xH100-80GB", *data, *settings)


def test_experts_are_counted() -> None:
    mixtures = qwen().mixtures
    counted = (mixtures.layers, mixtures.experts, mixtures.chosen, mixtures.parameters)
    assert counted == (48, 128, 8, ROUTED)
    assert qwen().estimated == pytest.approx(30.5e9, rel=0.005)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_holds_its_experts_and_gathers_none(stage: int) -> None:
    """A parameter of an expert takes its weight of 16 bits, and in float32 master, gradient and two
    moments; one of the rest is sharded in float32, and gathered."""
    model = qwen()
    layout = Layout(2, shards=RANKS, zero_stage=stage, divides=True, tokens=4096)
    found = price(model, layout)
    own = ROUTED // RANKS
    rest = (model.parameters or 0) - ROUTED
    summed = rest if stage == 1 else rest // RANKS
    assert found.weights == pytest.approx(2 * own + 4 * rest // RANKS, rel=1e-6)
    assert found.gradients == pytest.approx(4 * own + 4 * summed, rel=1e-6)
    assert found.optimizer == pytest.approx(12 * own + 8 * rest // RANKS, rel=1e-6)
    whole = price(model, replace(layout, divides=False))
    gone = 2 * ROUTED if stage == 1 else 2 * ROUTED // 48
    assert whole.gathered - found.gathered == pytest.approx(gone, rel=0.05)
    in_host_memory = price(model, replace(layout, offload=True))
    assert in_host_memory.host > 16 * own
    assert in_host_memory.optimizer == 0


def test_experts_beside_an_adapter_are_weights_alone() -> None:
    """They are frozen, and bitsandbytes does not quantise them: they are no linear modules."""
    model = qwen()
    layout = Layout(2, shards=RANKS, zero_stage=3, divides=True, tokens=4096, lora_rank=16)
    found = price(model, layout)
    assert found.weights > 2 * ROUTED // RANKS
    assert found.gradients + found.optimizer < 0.05 * found.weights
    rest = (model.parameters or 0) - ROUTED - model.outside_layers
    copy = 2 * (ROUTED + model.outside_layers) + int(0.516 * rest)
    assert copy_bytes(model, 2, "nf4") == copy
    quantised = price(model, replace(layout, divides=False, quantize="nf4"))
    assert copy // RANKS <= quantised.weights < 1.05 * copy // RANKS


def test_tokens_travel_instead_of_weights(tmp_path: Path) -> None:
    stage = "system.zero_stage=3"
    plan = planned(tmp_path, stage, "system.expert_parallel_size=8")
    model = plan.facts.model
    assert model is not None
    assert plan.devices.shards == RANKS
    [sent] = step_work(plan, model, 64, 4096)["between GPUs"]
    micro = -(-64 * 4096 // RANKS // (plan.memory.microbatch or 1))
    rest = (model.parameters or 0) - ROUTED
    copies = 2 * 48 * 8 * 2048 * 2 * (2 + plan.memory.share_again)
    travelled = 64 * 4096 / RANKS * copies
    expected = (travelled + micro * (4 + 2 * 2) * rest) * (RANKS - 1) / RANKS
    assert sent["bytes between GPUs"] == pytest.approx(expected, rel=1e-6)
    gathering = planned(tmp_path, stage)
    [others] = step_work(gathering, model, 64, 4096)["between GPUs"]
    assert others["bytes between GPUs"] > sent["bytes between GPUs"]


def test_the_ranks_that_divide_the_experts_share_the_rest(tmp_path: Path) -> None:
    plan = planned(tmp_path, "system.expert_parallel_size=8")
    assert plan.devices.trainer_ranks == plan.devices.shard_size == RANKS
    assert plan.devices.zero_stage > 0
    reasons = {entry.key: entry.reason for entry in plan.reasons}
    assert reasons["system.shard_size"] == "the ranks that divide the experts share everything else"


def test_a_size_that_does_not_divide_the_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, "system.trainer_ranks=6", "system.expert_parallel_size=6")
    assert refused.value.problems[0].keys == ("system.expert_parallel_size",)
    assert "128 experts" in str(refused.value)
