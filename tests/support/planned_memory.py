"""Machines and models whose memory is planned."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    GenerateConfig,
    OfflineDistillConfig,
    RFTConfig,
    RMConfig,
)
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve

GB = 10**9
QWEN_7B = ModelFacts(7_615_616_512, 28, 3584, 18944, 28, 4, 128, 152064, 32768)
LLAMA_70B = ModelFacts(70_553_706_496, 80, 8192, 28672, 64, 8, 128, 128256, 131072)
SMALL = ModelFacts(5_000_000, 6, 256, 768, 4, 2, 64, 4096, 4096)
A10G = Gpu("A10G", 24 * GB, 23 * GB, (8, 6))
A100 = Gpu("A100", 80 * GB, 79 * GB, (8, 0))
KINDS: dict[Any, list[str]] = {
    SFTConfig: [],
    RMConfig: [],
    DPOConfig: [],
    GenerateConfig: [],
    RLConfig: ['reward.functions=["math"]'],
    RFTConfig: ['reward.functions=["math"]'],
    DistillConfig: ["teacher.path=org/t"],
    OfflineDistillConfig: ["distill.mode=offline", "teacher.path=org/t"],
}


def on(gpu: Gpu | None, model: ModelFacts, memory: int = 64 * GB, **changes: Any) -> Facts:
    machine = Hardware("CPU", 8, memory, memory, bf16=True, gpus=(gpu,) if gpu else ())
    return Facts(machine, model, **{"train_size": 1000, "longest": 1000, **changes})


def resolved(kind: Any, facts: Facts, *said: str) -> Any:
    config = load_config(kind, None, ["model.path=org/m", "data.train=org/d", *KINDS[kind], *said])
    return resolve(config, facts)


def refusal(kind: Any, facts: Facts, *said: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(kind, facts, *said)
    return str(caught.value)
