"""Experts compute the same in a grouped product as one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compiled_layers import resolved
from tests.support.families import (
    SPECIAL,
    assert_same_gradients,
    build,
    gradients,
    logprobs,
    samples,
)
from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.config.schema import LoraSection
from tunesmith.models.adapters import attach
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.activations import compute_again
from tunesmith.plan.facts.experts import expert_widths, implementation


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        ("gpt_oss", set[str]()),  # transposed, interleaved, with biases
        ("nemotron_h", {"checkpointing"}),  # no gate
        ("deepseek_v3", {"adapter"}),
        ("qwen3_moe", {"adapter", "checkpointing"}),
    ],
)
def test_gradients_are_those_of_a_loop_over_experts(model_type: str, changed: set[str]) -> None:
    model = build(model_type)
    model.module.set_attn_implementation(ATTENTION_NAME)
    if "adapter" in changed:
        torch.manual_seed(0)
        model.adapter = attach(model, LoraSection(rank=4))
    if "checkpointing" in changed:
        compute_again(model.module, 1.0)
    model.module.train()
    forest = forest_of(samples())
    grouped, _ = logprobs(model, forest)
    ours = gradients(model, grouped)
    model.module.set_experts_implementation("eager")
    loop, _ = logprobs(model, forest)
    torch.testing.assert_close(grouped, loop, rtol=0, atol=1e-5)
    assert_same_gradients(ours, gradients(model, loop), 1e-5)


@pytest.mark.parametrize(
    ("on_gpu", "size", "inner", "best"),
    [
        (True, 2, 768, "grouped_mm"),
        (True, 2, 20, "eager"),  # 40 bytes
        (True, 4, 20, "grouped_mm"),
        (False, 2, 20, "grouped_mm"),
    ],
)
def test_rows_of_grouped_products_on_gpus_are_multiples_of_16_bytes(
    on_gpu: bool, size: int, inner: int, best: str
) -> None:
    config = {"num_experts": 8, "hidden_size": 2048, "moe_intermediate_size": inner}
    assert implementation(expert_widths(config), size, on_gpu=on_gpu)[0] == best


def test_the_plan_says_how_experts_compute_and_the_model_does_so(tmp_path: Path) -> None:
    key = "system.experts_implementation"
    plan = resolved(tmp_path, "sft", family="qwen3_moe")
    assert plan.settings[key] == plan.devices.experts == "grouped_mm"
    assert any(entry.key == key for entry in plan.reasons)
    assert resolved(tmp_path, "sft", f"{key}=eager", family="qwen3_moe").devices.experts == "eager"
    path = save_model(tmp_path / "model", "qwen3_moe", **SPECIAL["qwen3_moe"])

    def chosen(**options: Any) -> dict[str, str | None]:
        return CausalLM.load(path, **options).module.get_experts_implementation()

    assert chosen() == {"": "grouped_mm"}
    assert chosen(experts="eager") == {"": "eager"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_on_a_gpu_gradients_are_those_of_a_loop(dtype: torch.dtype, most: float) -> None:
    model = build("qwen3_moe", dtype)
    torch.nn.Module.to(model.module, "cuda")
    model.module.set_attn_implementation(ATTENTION_NAME)
    forest = forest_of(samples()).to(torch.device("cuda"))
    found: list[dict[str, torch.Tensor]] = []
    for how in ("grouped_mm", "eager"):
        model.module.set_experts_implementation(how)
        found.append(gradients(model, logprobs(model, forest)[0].cpu()))
    assert_same_gradients(found[0], found[1], most)
