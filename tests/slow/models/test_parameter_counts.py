"""The planner's counts of parameters, from a configuration alone, are those of the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.model import facts_of

MISSING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
}
"""What a family's default configuration lacks."""


TEXT = [
    name
    for name, each in families().items()
    if not (each.multimodal or each.inner)
    and name != "gemma4_text"  # whose layers differ in width, share keys, and have embeddings
]


@pytest.mark.parametrize("model_type", TEXT)
def test_counts_are_those_of_the_modules(model_type: str) -> None:
    """In the sizes of the family's default configuration: 0.1 to 230 billion."""
    config: Any = AutoConfig.for_model(model_type, **MISSING.get(model_type, {}))
    with init_empty_weights(), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    facts = facts_of(config.to_dict())
    assert facts is not None
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert facts.estimated == pytest.approx(counted, rel=0.005)
    experts = [p for name, p in module.named_parameters() if ".experts." in name]
    if experts:
        chosen = next(
            getattr(config, name)
            for name in ("num_experts_per_tok", "moe_k")
            if hasattr(config, name)
        )
        share = 1 - chosen / experts[0].shape[0]
        assert facts.idle == pytest.approx(share * sum(p.numel() for p in experts), rel=0.005)
    else:
        assert facts.idle == 0
