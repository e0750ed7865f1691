"""A lean layer's operations besides products and attention, in compiled functions that read
activations once.

They take bfloat16 on a CPU that supports them (``training_functions``), compute in float32 and
round their results; sums over rows are float32. Elsewhere ``lean_ops`` computes the same with
PyTorch's operations.

Shape legend: ``T`` tokens, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size, ``f`` feed-forward size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from typing import Any, cast

import torch
from torch import Tensor, nn

from tunesmith.models.cpu.training_functions import Heads, NormStruct, functions
from tunesmith.models.kernels.functions import HeadShape


def fits(*tensors: Tensor) -> bool:
    """Whether the compiled functions accept these tensors."""
    return (
        all(
            t.dtype == torch.bfloat16
            and t.device.type == "cpu"
            and type(t) in (Tensor, nn.Parameter)
            for t in tensors
        )
        and functions() is not None
    )


class RmsNorm(torch.autograd.Function):
    """``[T, d]``; see ``lean_ops.rms_norm``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        x = _rows(x)
        y = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(len(x))
        functions().tunesmith_norm(
            *x.shape, *_operand(x), byref(NormStruct(weight.data_ptr(), eps, offset)), y.data_ptr(), scales.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, scales)
        ctx.eps = eps
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scales = cast("tuple[Tensor, Tensor, Tensor]", ctx.saved_tensors)
        grad = _rows(grad)
        grad_x = torch.empty(x.shape, dtype=x.dtype)
        grad_weight = torch.empty(weight.shape) if ctx.needs_input_grad[1] else None
        functions().tunesmith_norm_backward(
            *x.shape, *_operand(x), *_operand(grad), byref(NormStruct(weight.data_ptr(), ctx.eps, ctx.offset)),
            scales.data_ptr(), grad_x.data_ptr(), _place(grad_weight), torch.get_num_threads(),
        )  # fmt: skip
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


class TurnedHeads(torch.autograd.Function):
    """Rotated queries ``[T, H, D]``, rotated keys and values ``[T, K, D]``; see
    ``lean_ops.heads``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, shape: HeadShape, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _rows(x).detach()
        size = cos.shape[-1]
        q, k = (
            torch.empty(len(x), count, size, dtype=x.dtype)
            for count in (shape.heads, shape.kv_heads)
        )
        scales = torch.empty(len(x), shape.heads + shape.kv_heads) if weights else None
        heads, keep = _heads(x, cos, sin, weights, shape)
        functions().tunesmith_heads(
            byref(heads), q.data_ptr(), k.data_ptr(), _place(scales), torch.get_num_threads()
        )
        del keep
        # Without norms the backward pass does not need x.
        ctx.save_for_backward(x if weights else None, cos, sin, scales, *weights)
        ctx.shape = shape
        return q, k, x[:, -shape.kv_heads * size :].unflatten(1, (shape.kv_heads, size))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, cos, sin, scales, *weights = cast("tuple[Any, ...]", ctx.saved_tensors)
        shape = cast(HeadShape, ctx.shape)
        size = cos.shape[-1]
        grads = tuple(g if g.stride()[1:] == (size, 1) else g.contiguous() for g in grads)
        grad_x = torch.empty(len(cos), (shape.heads + 2 * shape.kv_heads) * size, dtype=cos.dtype)
        needed = bool(weights) and any(ctx.needs_input_grad[4:])
        grad_weights = torch.empty(2, size) if needed else None
        heads, keep = _heads(x, cos, sin, weights, shape)
        functions().tunesmith_heads_backward(
            byref(heads), (c_void_p * 3)(*(g.data_ptr() for g in grads)), (c_int64 * 3)(*(g.stride(0) for g in grads)),
            _place(scales), grad_x.data_ptr(), _place(grad_weights), torch.get_num_threads(),
        )  # fmt: skip
        del keep
        own = (
            [None] * len(weights) if grad_weights is None else grad_weights.to(cos.dtype).unbind(0)
        )
        return grad_x, None, None, None, *own


class Gated(torch.autograd.Function):
    """``silu(gate) * up`` of ``[T, 2 f]``, gate first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = _rows(x)
        y = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
        functions().tunesmith_gate(*y.shape, *_operand(x), y.data_ptr(), torch.get_num_threads())
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = cast("tuple[Tensor]", ctx.saved_tensors)
        grad = _rows(grad)
        grad_x = torch.empty(x.shape, dtype=x.dtype)
        functions().tunesmith_gate_backward(
            *grad.shape, *_operand(x), *_operand(grad), grad_x.data_ptr(), torch.get_num_threads()
        )
        return grad_x


def _heads(
    x: Tensor | None, cos: Tensor, sin: Tensor, weights: Sequence[Tensor], shape: HeadShape
) -> tuple[Heads, object]:
    """The arguments of a compiled function, and objects that must outlive the call."""
    norms = (NormStruct * len(weights))(
        *(NormStruct(w.data_ptr(), shape.eps, shape.offset) for w in weights)
    )
    cos = cos.contiguous()
    sin = sin.contiguous()
    at, step = (None, 0) if x is None else _operand(x)
    tables = (cos.data_ptr(), sin.data_ptr(), ctypes.addressof(norms) if weights else None)
    return Heads(at, *tables, len(cos), step, shape.heads, shape.kv_heads, cos.shape[-1]), (
        norms,
        cos,
        sin,
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _operand(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.stride(0)


def _place(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
