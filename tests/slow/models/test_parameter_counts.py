"""The planner's counts of parameters, from a configuration alone, are those of the modules."""

from __future__ import annotations

import tomllib
from typing import Any, cast

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.documents import SUPPORT
from tunesmith.models.adapters import linear_modules
from tunesmith.models.kernels.layers import text_decoder
from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.model import facts_of

MISSING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
}
"""What a family's default configuration lacks."""


TEXT = [name for name, each in families().items() if not (each.multimodal or each.inner)]
CHECKPOINTS: dict[str, dict[str, Any]] = tomllib.loads((SUPPORT / "checkpoints.toml").read_text())


def module_of(config: Any) -> Any:
    with init_empty_weights(), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    return module


@pytest.mark.parametrize("model_type", TEXT)
def test_counts_are_those_of_the_modules(model_type: str) -> None:
    """In the sizes of the family's default configuration: 0.1 to 230 billion."""
    config: Any = AutoConfig.for_model(model_type, **MISSING.get(model_type, {}))
    module = module_of(config)
    facts = facts_of(config.to_dict())
    assert facts is not None
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert facts.estimated == pytest.approx(counted, rel=0.005)
    linear = linear_modules(text_decoder(module))
    widths = sum(sum(cast(Any, part).weight.shape) for part in linear.values())
    assert facts.widths == pytest.approx(widths, rel=0.2)
    experts = [p for name, p in module.named_parameters() if ".experts." in name]
    if experts:
        chosen = next(
            getattr(config, name)
            for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
            if hasattr(config, name)
        )
        share = 1 - chosen / experts[0].shape[0]
        assert facts.idle == pytest.approx(share * sum(p.numel() for p in experts), rel=0.005)
    else:
        assert facts.idle == 0


@pytest.mark.parametrize("model_type", TEXT)
def test_heads_are_tied_where_published_configurations_leave_it_out(model_type: str) -> None:
    config: Any = AutoConfig.for_model(model_type, **MISSING.get(model_type, {}))
    written = config.to_dict()
    written.pop("tie_word_embeddings")
    facts = facts_of(written)
    assert facts is not None
    assert facts.tied == config.tie_word_embeddings


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_checkpoints_have_the_parameters_of_their_modules(name: str) -> None:
    published = CHECKPOINTS[name]
    whole = published["config"]
    written = dict(whole.get("text_config") or whole)
    written.pop("quantization_config", None)
    if "tie_word_embeddings" in whole:
        written["tie_word_embeddings"] = whole["tie_word_embeddings"]
    module = module_of(AutoConfig.for_model(written.pop("model_type"), **written))
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert published["billions"] == pytest.approx(counted / 1e9, rel=0.005)
    facts = facts_of(whole)
    assert facts is not None
    assert facts.estimated == pytest.approx(counted, rel=0.005)
