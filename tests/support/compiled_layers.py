"""Models whose layers are compiled, and what their runs resolve to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import save_model
from tests.support.training import forest_of, samples_of
from tunesmith.config.commands import KINDS
from tunesmith.config.load import load_config
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "phi3": {},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
}


def gradients(model: CausalLM, seed: int = 0) -> dict[str, torch.Tensor]:
    model.module.train()
    model.module.zero_grad()
    model.predict(forest_of(samples_of(seed))).logprobs.sum().backward()
    return {
        name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None
    }


def resolved(
    tmp_path: Path, command: str, *said: str, family: str = "llama", on: str = ""
) -> AnyPlan:
    model = save_model(tmp_path / family, family)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    given = [f"model.path={model}", f"data.train={data}", *said]
    hardware = machine(on) if on else read_hardware()
    return resolve(
        load_config(KINDS[command], None, given), Facts(hardware, read_model_facts(model))
    )
