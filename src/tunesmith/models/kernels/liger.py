"""Liger's Triton kernels instead of ``lean_ops``' functions, on CUDA GPUs (the extra ``liger``).

Norms, the rotation of queries and keys, and SwiGLU are one kernel each, which reads its operands
once. The autograd functions around them are our own: Liger's overwrite the incoming gradient and
their saved tensors, which others may hold (gradient checkpointing, activations in host memory, the
other branch of a residual). They save the same tensors for the backward pass as ``lean_ops``.

Rounding follows ``lean_ops``, and the gradient of a norm's weight is a float32 sum of float32
terms. Rotations are computed in float32 and rounded once.

``lean_ops`` computes the rest: GEGLU, whose kernel takes gate and up as two tensors, so copies
would cost what it saves; and everything in inference mode, where an engine decodes few rows. The
head is ours too. Liger's head computes gradients in the forward pass, for its own loss over one
target per row; ours returns float32 log-probabilities of any tokens and the entropy of every row,
and backpropagates from any objective of them.

Shape legend: ``T`` tokens, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size, ``f`` size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tunesmith.models.kernels import lean_ops
from tunesmith.models.kernels.functions import HeadShape
from tunesmith.models.kernels.lean_ops import Activation, Operations

USED = ("rms_norm", "rope", "swiglu")
"""The modules of ``liger_kernel.ops`` with the kernels."""
_AS_LLAMA = 0
_AS_GEMMA = 1
"""Liger's codes for where a norm rounds: before the weight is applied, or only at the end."""
_MOST_NUMBERS = 2**31
"""The kernel for many short rows computes tensor offsets in 32 bits."""


@cache
def kernels(name: str) -> Any:
    """A module of ``USED``, imported directly: ``liger_kernel.ops`` substitutes others if the
    environment says so."""
    return import_module(f"liger_kernel.ops.{name}")


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """As ``lean_ops.rms_norm``, for rows ``[..., d]`` with one weight ``[d]``."""
    return _RmsNorm.apply(x, weight, eps, offset)


def heads(
    x: Tensor, tables: tuple[Tensor, Tensor] | None, weights: Sequence[Tensor], shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``lean_ops.heads``; the halves of the cosines are equal, and those of the sines except for
    the sign."""
    q, k, v = shape.split(x, shape.heads, shape.kv_heads, shape.kv_heads)
    if weights:
        pairs = zip((q, k), weights, strict=True)
        q, k = (rms_norm(part, w, shape.eps, shape.offset) for part, w in pairs)
    if tables is not None:
        q, k = _Rotate.apply(q, k, *tables)
    return q, k, v


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """As ``lean_ops.gated``."""
    return _Gated.apply(gate_up) if activation == "silu" else lean_ops.gated(gate_up, activation)


LIGER = Operations(rms_norm, heads, gated)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        mode = _AS_GEMMA if offset else _AS_LLAMA
        by_row = x.numel() >= _MOST_NUMBERS
        with torch.cuda.device_of(x):
            forward: Any = kernels("rms_norm").rms_norm_forward
            y, _, scale, *launch, _ = forward(
                x.contiguous(), weight, eps, float(offset), mode, by_row
            )
        # Save ``x`` itself: a contiguous copy of part of the joint queries, keys and values would
        # be kept in addition.
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = float(offset)
        ctx.launch = launch
        ctx.by_row = by_row
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, scale = ctx.saved_tensors
        with torch.cuda.device_of(x):
            backward: Any = kernels("rms_norm").rms_norm_backward
            rows = x.contiguous().view(-1, x.shape[-1])
            # As for Gemma, wherever the forward pass rounded: all terms are float32.
            grad_x, grad_weight = backward(
                grad.contiguous(), rows, weight, scale, ctx.offset, _AS_GEMMA, *ctx.launch,
                in_place=False, row_mode=ctx.by_row,
            )  # fmt: skip
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None


class _Rotate(torch.autograd.Function):
    # Liger's functions read only the first half of the tables. In our ``sin`` that half is negated,
    # so its backward is our forward and vice versa.
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(kernels("rope").rope_backward, q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        cos, sin = ctx.saved_tensors
        return *_rotated(kernels("rope").rope_forward, grads[0], grads[1], cos, sin), None, None


def _rotated(
    rotation: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries ``[T, H, D]`` and keys ``[T, K, D]``, rotated out of place by tables ``[T, 1,
    D]``."""
    # The kernel works in place, in the dtype of the tables, on batched tensors with heads before
    # tokens.
    plain = torch.contiguous_format
    copies = (t.clone(memory_format=plain).unsqueeze(0).transpose(1, 2) for t in (q, k))
    tables = (table.float().transpose(0, 1).contiguous() for table in (cos, sin))
    with torch.cuda.device_of(q):
        q, k, *_ = rotation(*copies, *tables)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        with torch.cuda.device_of(gate_up):
            return kernels("swiglu").swiglu_fused_gate_up_forward(gate_up.contiguous())[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        (gate_up,) = ctx.saved_tensors
        with torch.cuda.device_of(gate_up):
            backward: Any = kernels("swiglu").swiglu_fused_gate_up_backward
            return backward(gate_up.contiguous(), grad.contiguous(), in_place=False).view_as(
                gate_up
            )
