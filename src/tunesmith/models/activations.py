"""Gradient checkpointing: activations that the backward pass recomputes."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.errors import ModelError
from tunesmith.models.sharding import decoder_layers
from tunesmith.plan.cost.price import recomputed


def compute_again(module: PreTrainedModel, share: float) -> None:
    """Keep only the input of a share of the decoder's layers, and recompute their activations in the backward pass.

    Raises:
        ModelError: the layers cannot be checkpointed individually.
    """
    module.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(module)
    if share < 1 and not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise ModelError(
            f"system.gradient_checkpointing = {share:g}: the layers of '{module.name_or_path}' cannot be computed "
            "again one by one; set it to true or false"
        )
    for layer, again in zip(layers, recomputed(len(layers), share), strict=True):
        vars(layer)["gradient_checkpointing"] = again  # as transformers sets it for all
