"""What Llama 4 does otherwise: queries have a temperature by position, and experts get all tokens.

In transformers a layer counts positions from the start of the batch, and each expert computes every
token, those that it was not chosen for as zeros. Here positions are those in the sequence, and
experts compute the tokens that they were chosen for, in one grouped product.

Shape legend: ``T`` tokens, ``H`` query heads, ``D`` head size, ``d`` hidden size, ``k`` experts of
a token.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextMoe


class Tempered:
    """An attention module that leaves the temperatures of its queries to the attention function."""

    attn_temperature_tuning = False

    def __init__(self, module: Llama4TextAttention) -> None:
        self._module = module

    @property
    def layer_idx(self) -> int:
        return self._module.layer_idx

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def tempered(self, query: Tensor, positions: Tensor) -> Tensor:
        """Queries ``[T, H, D]`` at these positions ``[T]``."""
        module = self._module
        blocks = torch.floor((positions.float() + 1.0) / module.floor_scale)
        factors = torch.log1p(blocks) * module.attn_scale + 1.0
        return (query * factors[:, None, None]).to(query.dtype)


def changed(module: nn.Module) -> Callable[..., object] | None:
    """What runs instead of a module's forward pass, if it is one of these."""
    if isinstance(module, Llama4TextMoe):
        return mixture
    if isinstance(module, Llama4TextAttention) and not module.use_rope:
        return attention if module.attn_temperature_tuning else None
    return None


def attention(module: Llama4TextAttention, *args: object, **kwargs: object) -> object:
    """The module's attention with temperatures by position."""
    run: Callable[..., object] = getattr(type(module), "forward")  # noqa: B009
    return run(Tempered(module), *args, **kwargs)


def mixture(module: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, d]``, and the router's logits."""
    rows = hidden_states.reshape(-1, module.hidden_dim)
    every, logits = module.router(rows)  # scores of experts that are not chosen are 0
    best, chosen = every.topk(module.top_k, dim=1)
    scores = best.flatten()
    order = chosen.flatten().argsort(stable=True)  # [T * k], expert by expert
    tokens = order // module.top_k
    ends = chosen.flatten().bincount(minlength=module.num_experts).cumsum(0).to(torch.int32)
    experts = module.experts
    inputs = rows.index_select(0, tokens) * scores.index_select(0, order).unsqueeze(1)
    product = _one_by_one if getattr(module, "one_by_one", False) else F.grouped_mm
    gate, up = product(inputs, experts.gate_up_proj, offs=ends).chunk(2, dim=-1)
    outputs = product(up * experts.act_fn(gate), experts.down_proj, offs=ends)
    return module.shared_expert(rows).index_add(0, tokens, outputs), logits


def _one_by_one(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """``F.grouped_mm`` as one product per expert."""
    starts = [0, *offs.tolist()]
    groups = rows.split([stop - start for start, stop in pairwise(starts)])
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def compute_one_by_one(model: nn.Module) -> None:
    """Let each expert compute by itself (``system.experts_implementation = "eager"``)."""
    for module in model.modules():
        if isinstance(module, Llama4TextMoe):
            setattr(module, "one_by_one", True)  # noqa: B010


def chunk_of(config: PreTrainedConfig, layer: int) -> int | None:
    """The size of the fixed chunks within which a layer attends; None: it has none."""
    kinds = getattr(config, "layer_types", None) or ()
    chunked = layer < len(kinds) and kinds[layer] == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) if chunked else None
