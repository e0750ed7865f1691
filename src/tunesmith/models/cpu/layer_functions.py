"""A lean layer's operations besides products and attention, in compiled operations that read
activations once, with their gradients; see ``functions``.

Shape legend: ``T`` tokens, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size, ``f`` feed-forward size.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunesmith.models.cpu.native import OPERATIONS
from tunesmith.models.kernels.functions import HeadShape


class RmsNorm(torch.autograd.Function):
    """``[T, d]``; see ``lean_ops.rms_norm``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        y, scales = OPERATIONS.norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scales)
        ctx.settings = (eps, offset)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        weighs = ctx.needs_input_grad[1]
        grad_x, grad_weight = OPERATIONS.norm_backward(
            x, grad, weight, scales, *ctx.settings, weighs
        )
        return grad_x, grad_weight.to(weight.dtype) if weighs else None, None, None


class TurnedHeads(torch.autograd.Function):
    """Rotated queries ``[T, H, D]``, rotated keys and values ``[T, K, D]``; see
    ``lean_ops.heads``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, shape: HeadShape, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = (shape.heads, shape.kv_heads, shape.eps, shape.offset)
        q, k, scales = OPERATIONS.heads(x, cos, sin, weights, *settings)
        # Without norms the backward pass does not need x.
        ctx.save_for_backward(x if weights else None, cos, sin, scales, *weights)
        ctx.settings = settings
        size = cos.shape[-1]
        values = x.detach()[:, -shape.kv_heads * size :]
        return q, k, values.unflatten(1, (shape.kv_heads, size))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, scales, *weights = ctx.saved_tensors
        weighs = bool(weights) and any(ctx.needs_input_grad[4:])
        grad_x, grad_weights = OPERATIONS.heads_backward(
            grads, x, cos, sin, weights, scales, *ctx.settings, weighs
        )
        own = grad_weights.to(cos.dtype).unbind(0) if weighs else [None] * len(weights)
        return grad_x, None, None, None, *own


class Gated(torch.autograd.Function):
    """``silu(gate) * up`` of ``[T, 2 f]``, gate first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return OPERATIONS.gate(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return OPERATIONS.gate_backward(x, grad)
