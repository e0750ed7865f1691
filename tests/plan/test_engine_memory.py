"""Memory of engines and teachers: rounded weights, ranks that share a CPU, large passes."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.machine_facts import SMALL, facts
from tests.support.planned_memory import A100, GB, QWEN_7B, on, resolved
from tunesmith.config.commands import DistillConfig, OfflineDistillConfig
from tunesmith.config.schema import RLConfig
from tunesmith.plan.cost.activations import scoring_bytes, taught_bytes
from tunesmith.plan.cost.memory import LIMIT, layout_of, planned
from tunesmith.plan.cost.passes import pass_tokens
from tunesmith.plan.cost.price import LIBRARIES
from tunesmith.plan.derive.sizes import pass_bytes
from tunesmith.plan.facts.hardware import Gpu

ELSEWHERE = ("system.engine_process=true", f'system.engine_python="{sys.executable}"')
VLLM = ("system.engine=vllm", "algorithm.correction=token_truncate", *ELSEWHERE)
FP8 = "system.vllm.quantization=fp8_per_channel"
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 84 * GB, (9, 0))


@pytest.mark.parametrize("experts", [0, 5 * 10**9])
def test_weights_that_vllm_rounds_to_8_bits_take_half(experts: int) -> None:
    """Of layers and experts, not of the embedding and the head."""
    model = replace(QWEN_7B, mixtures=replace(QWEN_7B.mixtures, parameters=experts))
    wide, narrow = (
        planned(resolved(RLConfig, on(H100, model), *VLLM, *more, "lora.rank=8"))
        for more in ((), (FP8,))
    )
    assert wide is not None and narrow is not None
    inner = (QWEN_7B.parameters or 0) - QWEN_7B.outside_layers
    assert wide.engine - narrow.engine == pytest.approx(0.995 * inner, rel=1e-6)


@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_ranks_on_a_cpu_share_what_engines_hold(engine: str) -> None:
    """The parts of all ranks add up to the engines' weights, keys and values."""

    def held(ranks: int) -> tuple[int, int]:
        said = [f"system.engine={engine}", f"system.trainer_ranks={ranks}", "system.engines=3"]
        more = [*ELSEWHERE, "system.kv_memory=100MB"]
        found = planned(resolved(RLConfig, facts(), *said, *more))
        assert found is not None
        return found.engine * ranks, found.kv * ranks

    weights, kv = held(1)
    assert kv == 3 * 100 * 10**6
    assert weights >= 3 * 2 * (SMALL.parameters or 0)
    assert held(2) == (weights, kv)


@pytest.mark.parametrize("kind", [DistillConfig, OfflineDistillConfig])
def test_a_teacher_computes_with_a_shape_of_its_own(kind: Any) -> None:
    """Of 16 times the parameters: four times the width, and as wide a pass."""
    numbers = 16 * (SMALL.parameters or 0)
    widths = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 256}
    teacher = replace(SMALL, parameters=numbers, layers=15, tied=True, **widths)
    gpu = replace(A100, memory_free=2 * GB)
    away = [f"system.offload_{part}=false" for part in ("activations", "reference")]
    said = (*away, "system.gradient_checkpointing=true")
    plan = resolved(kind, on(gpu, SMALL, frozen_parameters=numbers), *said)
    found = planned(plan)
    layout = layout_of(plan)
    assert found is not None
    assert found.scored == scoring_bytes(teacher, layout)
    assert taught_bytes(SMALL, replace(layout, frozen_parameters=0)) == 0
    assert max(found.scoring, found.teaching) <= found.peak <= LIMIT * 2 * GB - LIBRARIES
    alike = resolved(kind, on(gpu, SMALL, frozen_parameters=SMALL.parameters), *said)
    assert plan.memory.microbatch < alike.memory.microbatch == 32768


@pytest.mark.parametrize(
    ("name", "gigabytes", "tokens"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, 16384),
        ("NVIDIA A100-SXM4-80GB", 80.0, 8192),
        ("NVIDIA L4", 22.5, 8192),
        ("NVIDIA B200", 179.1, 16384),
    ],
)
def test_the_plan_says_the_tokens_of_vllms_passes_and_counts_them(
    name: str, gigabytes: float, tokens: int
) -> None:
    gpu = Gpu(name, int(gigabytes * 2**30), int(gigabytes * 2**30), (9, 0))
    plan = resolved(RLConfig, on(gpu, SMALL), *VLLM)
    assert plan.settings["system.vllm.max_batched_tokens"] == tokens == pass_tokens(plan)
    fewer = resolved(RLConfig, on(gpu, SMALL), *VLLM, "system.vllm.max_batched_tokens=4096")
    widths = 2 * (2 * SMALL.inner_width + 4 * SMALL.hidden_size)
    assert fewer.vllm.step_tokens == 4096
    assert pass_bytes(plan) - pass_bytes(fewer) == (tokens - 4096) * widths
    own = resolved(RLConfig, on(gpu, SMALL), "system.engine=local", "system.max_prefill_tokens=64")
    assert pass_tokens(own) == 64
