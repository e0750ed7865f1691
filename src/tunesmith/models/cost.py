"""What a model's training costs in floating-point operations."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from tunesmith.data.packing import CostModel
from tunesmith.models.causal_lm import CausalLM


def training_cost(model: CausalLM) -> CostModel:
    """Operations of forward and backward per token, per pair and per loss token."""
    config: Any = model.module.config.get_text_config()
    embedding = cast(nn.Embedding, model.module.get_input_embeddings()).weight.numel()
    heads = config.num_attention_heads
    return CostModel.of_decoder(
        parameters=sum(p.numel() for p in model.module.base_model.parameters()) - embedding,
        layers=config.num_hidden_layers,
        heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=model.head.out_features,
        hidden=model.head.in_features,
    )
