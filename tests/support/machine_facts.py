"""Facts of machines and models that runs are resolved with."""

from __future__ import annotations

from typing import Any

from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts

GB = 10**9
CPU = Hardware("a CPU", cores=4, memory_total=16 * GB, memory_available=8 * GB, bf16=True)
SMALL = ModelFacts(
    parameters=5_000_000,
    layers=6,
    hidden_size=256,
    intermediate_size=768,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab_size=4096,
    context=4096,
)


def facts(**changes: Any) -> Facts:
    return Facts(**{"hardware": CPU, "model": SMALL, "train_size": 1000, "longest": 100, **changes})
