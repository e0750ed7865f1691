"""The training cost of a model in floating-point operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn

from tunesmith.kernels.quantised import weights_of
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.cost.operations import CostModel


def training_cost(model: CausalLM) -> CostModel:
    """Operations of forward and backward per token, per pair and per loss token."""
    config: Any = model.module.config.get_text_config()
    embedding = cast(nn.Embedding, model.module.get_input_embeddings()).weight.numel()
    heads = config.num_attention_heads
    weights = list(weights_of(model.module.base_model))
    cost = CostModel.of_decoder(
        parameters=sum(count for _, count in weights) - embedding,
        layers=config.num_hidden_layers,
        heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=model.head.out_features,
        hidden=model.head.in_features,
    )
    if model.adapter is None:
        return cost
    # A frozen weight needs no gradient: two products instead of three.
    frozen = sum(count for p, count in weights if not p.requires_grad) - embedding
    return replace(cost, linear=cost.linear - 2.0 * frozen, head=cost.head * 2 / 3)
