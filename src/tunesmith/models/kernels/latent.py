"""Latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one
narrow latent per token, beside which the keys have a rotated part that all heads share.

Who calls the model may keep the latent instead of keys and values, and attend to it: the matrix
that makes the keys is then applied to the queries, and the one that makes the values to the
outputs.

Shape legend: ``T`` tokens, ``H`` query heads, ``D`` head size, ``V`` size of a head's values, ``R``
of the latent, ``W`` of the latent and the rotated part.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tunesmith.models.kernels.attention import ATTENTION_NAME, AttentionRule


class Latent:
    """A module's latents, which stand for its keys and values until these are wanted.

    It is called as the module's ``expand_kv`` in transformers.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.rank: int = module.kv_lora_rank
        self.width = self.rank + int(module.qk_rope_head_dim)
        self.value_size: int = module.v_head_dim
        self._still: int = module.qk_nope_head_dim

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """``[1, 1, T, R]`` and ``[1, 1, T, W - R]``: latents ``[1, 1, T, W]`` as keys."""
        if self._module.config._attn_implementation != ATTENTION_NAME:
            return self._expand(kv_nope, k_rot)
        return torch.cat((kv_nope, k_rot), -1), kv_nope

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys ``[T, H, D]`` of latents ``[T, W]``, and the values, as wide with zeros."""
        latent, rotated = rows[None, None].split([self.rank, self.width - self.rank], -1)
        keys, values = (t[0].transpose(0, 1) for t in self._expand(latent, rotated))
        return keys, pad(values, (0, keys.shape[-1] - self.value_size))

    def absorb(self, query: Tensor) -> Tensor:
        """Queries ``[T, H, D]`` as ``[T, H, W]``, whose products with latents are those with the
        keys."""
        still, rotated = query.split([self._still, query.shape[-1] - self._still], -1)
        matrices = self._matrices(query.dtype)[:, : self._still]
        return torch.cat((torch.einsum("thd,hdr->thr", still, matrices), rotated), -1)

    def values(self, mixed: Tensor) -> Tensor:
        """The outputs ``[T, H, V]`` of latents ``[T, H, R]`` that were added up by weight."""
        return torch.einsum("thr,hvr->thv", mixed, self._matrices(mixed.dtype)[:, self._still :])

    def _expand(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return type(self._module).expand_kv(self._module, kv_nope, k_rot)

    def _matrices(self, dtype: torch.dtype) -> Tensor:
        """``[H, D - (W - R) + V, R]``: what makes keys and values, with an adapter added."""
        projection = self._module.kv_b_proj
        if type(projection) is nn.Linear:
            weight = projection.weight
        else:
            like = self._module.kv_a_layernorm.weight
            weight = projection(torch.eye(self.rank, dtype=like.dtype, device=like.device)).t()
        return weight.to(dtype).reshape(-1, self._still + self.value_size, self.rank)


@runtime_checkable
class LatentContext(Protocol):
    """An ``AttentionContext`` that keeps latents."""

    def attend_to_latents(
        self, layer: int, query: Tensor, rows: Tensor, latent: Latent, rule: AttentionRule
    ) -> Tensor:
        """``AttentionContext.attend`` with the latents ``[T, W]`` of the new tokens; the outputs
        are ``[T, H, V]``."""
        ...


def keep_latents(layers: nn.ModuleList) -> None:
    """Let modules of latent attention hand their latents to the attention function."""
    for module in layers.modules():
        if hasattr(type(module), "expand_kv"):
            setattr(module, "expand_kv", Latent(module))  # noqa: B010
