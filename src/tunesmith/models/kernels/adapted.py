"""Linear modules with a LoRA adapter, as their weights.

Shape legend: ``T`` tokens, ``d`` inputs, ``N`` outputs, ``r`` the rank, ``R`` all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tunesmith.models.kernels.functions import Prepare, Product, TakesAdapter

Adapted = tuple[tuple[Tensor, Tensor, float], ...]
"""``A`` ``[r, d]``, ``B`` ``[N, r]`` and the scale of each active adapter."""


def parts_of(module: nn.Module) -> tuple[nn.Module, Adapted]:
    """The module without its adapters, and those that are active."""
    if not hasattr(module, "lora_A"):  # peft is imported by runs with an adapter alone
        return module, ()
    layer: Any = module
    names = () if layer.disable_adapters else layer.active_adapters
    down = layer.lora_A
    up = layer.lora_B
    there = [name for name in names if name in down]
    active = ((down[name].weight, up[name].weight, layer.scaling[name]) for name in there)
    return layer.get_base_layer(), tuple(active)


def adapted_product(modules: Sequence[nn.Module], prepare: Prepare) -> Product:
    """The concatenated outputs ``[T, N]`` of modules with the same input, without gradients.

    ``W x`` is computed from what is prepared of all weights together, and ``B A x`` is added in
    float32, as in training: the adapter is never rounded. In ``B`` the columns of a module have
    numbers in the rows of its own outputs only.
    """
    bases, adapters = zip(*map(parts_of, modules), strict=True)
    weights = [base.weight.detach() for base in bases]
    biases = [base.bias.detach() for base in bases if base.bias is not None]
    whole = prepare(torch.cat(weights), torch.cat(biases) if biases else None)
    if not any(adapters):
        return whole
    down = torch.cat([a.detach() for adapted in adapters for a, _, _ in adapted])
    rows = zip(adapters, weights, strict=True)
    up = torch.block_diag(*(_stacked(adapted, len(weight), down) for adapted, weight in rows))

    if isinstance(whole, TakesAdapter):
        return whole.adapted(down, up)

    def product(x: Tensor) -> Tensor:
        return whole(x).add_(F.linear(F.linear(x.to(down.dtype), down), up))

    return product


def _stacked(adapted: Adapted, outputs: int, like: Tensor) -> Tensor:
    """``[N, r]``: the ``B`` of a module's adapters, with their scales."""
    own = [b.detach() * scale for _, b, scale in adapted]
    return torch.cat(own, 1) if own else like.new_empty(outputs, 0)
