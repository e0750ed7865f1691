"""A family and a kind of layer as another package adds them: LFM2 and its short convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tunesmith.models.forest import PackedLengths
from tunesmith.models.kernels.layers import State

FAMILIES = {"lfm2": dict[str, bool]()}


class ShortConvolutions:
    """Causal convolutions over a few tokens, with gates before and after.

    The state is the inputs of the convolution at the last tokens, ``[S, width - 1, d]``.
    """

    layer_types = ("conv",)

    def supports(self, module: nn.Module) -> bool:
        return type(module).__name__ == "Lfm2ShortConv"

    def run(
        self, module: Any, x: Tensor, lengths: PackedLengths, state: State | None
    ) -> tuple[Tensor, State]:
        before, after, inner = module.in_proj(x).chunk(3, -1)
        width = module.conv.weight.shape[2]
        pasts = x.new_zeros(len(lengths), width - 1, x.shape[1]) if state is None else state[0]
        outputs: list[Tensor] = []
        ends: list[Tensor] = []
        for own, past in zip((before * inner).split(list(lengths)), pasts, strict=True):
            rows = torch.cat([past, own])
            ends.append(rows[len(own) :])
            weights = module.conv.weight[:, 0].t()
            outputs.append(sum(rows[i : i + len(own)] * weights[i] for i in range(width)))  # pyright: ignore[reportArgumentType]
        return module.out_proj(after * torch.cat(outputs)), (torch.stack(ends),)


CONVOLUTIONS = ShortConvolutions()
