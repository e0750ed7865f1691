"""The operations of a lean decoder layer, as autograd functions that save little and recompute the
rest.

Shape legend: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``f``
feed-forward size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.models.kernels.functions import HeadShape, computed, product, which
from tunesmith.models.kernels.gradient_sums import GradientSum, add_product, gradient, kept_sums

Activation = Literal["silu", "gelu", "gelu_tanh"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> Tensor:
    """``x @ weight.T + bias``; the gradient goes to ``weights`` and ``biases``, views of ``weight``
    and ``bias``."""
    return _Linear.apply(x, weight, bias, len(weights), kept_sums(weights), *weights, *biases)


def embed(token_ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """``weight[token_ids]``; the row ``padding`` gets no gradient."""
    kept = kept_sums([weight]) if torch.is_grad_enabled() else None
    if kept is None:
        return F.embedding(token_ids, weight, padding)
    return _Embed.apply(token_ids, weight, padding, kept[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, or ``* (1 + weight)`` with ``offset``.

    In bfloat16 the mean is taken in float32 and the normalized ``x`` is rounded before the weight
    is applied, or after it with ``offset``, as the Hugging Face families do.
    """
    functions = which(lambda functions: functions.fits(x, weight)) if x.dim() == 2 else None
    return computed(functions.RmsNorm if functions else _RmsNorm, x, weight, eps, offset)


def heads(
    x: Tensor, tables: tuple[Tensor, Tensor] | None, weights: Sequence[Tensor], shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, H, D]``, keys and values ``[T, K, D]``, with norms and rotary embedding.

    Args:
        x: their joint product ``[T, (H + 2 K) D]``, queries first.
        tables: cosines and sines, ``[T, 1, D]`` each, the first half of the sines negated; None:
            nothing is rotated.
        weights: the weights of the query norm and the key norm, which precede rotation; empty: no
            norms.
    """
    functions = tables and which(lambda functions: functions.fits(x, tables[0], *weights))
    if tables is not None and functions is not None:
        return computed(functions.Heads, x, *tables, shape, *weights)
    counts = shape.heads, shape.kv_heads
    qk, v = shape.split(x, sum(counts), shape.kv_heads)
    if weights:
        of_query, of_key = weights
        joint = torch.cat((of_query.expand(shape.heads, -1), of_key.expand(shape.kv_heads, -1)))
        qk = rms_norm(qk, joint, shape.eps, shape.offset)
    if tables is not None:
        qk = computed(_Rotate, qk, *tables)
    q, k = qk.split(counts, 1)
    return q, k, v


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up`` of ``[T, 2 f]``, gate first."""
    functions = which(lambda functions: functions.fits(gate_up)) if activation == "silu" else None
    if functions is not None:
        return computed(functions.Gated, gate_up)
    return computed(_Gated, gate_up, activation)


@dataclass(frozen=True, slots=True)
class Operations:
    """A layer's operations between its products and attention: ``rms_norm``, ``heads`` and
    ``gated``, or equivalents with the same arguments and results."""

    rms_norm: Callable[[Tensor, Tensor, float, bool], Tensor]
    heads: Callable[
        [Tensor, tuple[Tensor, Tensor] | None, Sequence[Tensor], HeadShape],
        tuple[Tensor, Tensor, Tensor],
    ]
    gated: Callable[[Tensor, Activation], Tensor]


OURS = Operations(rms_norm, heads, gated)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        count: int,
        kept: list[GradientSum] | None,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept, ctx.rows = kept, [len(p) for p in parts[:count]]
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        rows: list[int] = ctx.rows
        needs: tuple[bool, ...] = ctx.needs_input_grad
        kept: list[GradientSum] | None = ctx.kept
        parts: list[Tensor | None] = [None] * (len(needs) - 5)
        if kept is not None:
            add_product(grad, x, weight, kept)
        elif any(needs[5 : 5 + len(rows)]):
            parts[: len(rows)] = gradient(grad, x, weight).split(rows)
        if any(needs[5 + len(rows) :]):
            parts[len(rows) :] = grad.sum(0).split(rows)
        grad_x = product(grad, weight, turned=True) if needs[0] else None
        return grad_x, None, None, None, None, *parts


class JointWeight(torch.autograd.Function):
    """A tensor whose gradient goes to ``parts``, consecutive views of its rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, *grad.split(ctx.rows)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token_ids: Tensor, weight: Tensor, padding: int | None, kept: GradientSum
    ) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.padding = padding
        ctx.kept = kept
        return F.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (token_ids,) = ctx.saved_tensors
        total, adds = ctx.kept()
        rows = grad.to(total.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((token_ids == ctx.padding).unsqueeze(-1), 0)
        (total if adds else total.zero_()).index_add_(0, token_ids, rows)
        return None, None, None, None


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def _normalize(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    """The norm and ``1 / rms``, ``[..., 1]``."""
    # Elementwise operations on mixed dtypes are slow, so all operands are cast first. A vector norm
    # reads x once; a mean of squares reads it twice.
    exact = torch.promote_types(x.dtype, torch.float32)
    xf = x.to(exact)
    norm = torch.linalg.vector_norm(xf, dim=-1, keepdim=True)
    scale = torch.addcmul(
        _constant(eps, exact, x.device), norm, norm, value=1 / x.shape[-1]
    ).rsqrt_()
    y = xf * scale
    if offset:
        return y.mul_(weight.to(exact) + 1).to(x.dtype), scale
    return y.to(x.dtype).mul_(weight), scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        y, scale = _normalize(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, scale = ctx.saved_tensors
        grad = grad.to(scale.dtype)
        unit = x.to(scale.dtype) * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            leading = list(range(x.dim() - weight.dim()))
            grad_weight = (unit * grad).sum(leading).to(weight.dtype)
        inner = grad * (weight.to(scale.dtype) + 1 if ctx.offset else weight.to(scale.dtype))
        mean = torch.linalg.vecdot(inner, unit).unsqueeze(-1).mul_(-1 / x.shape[-1])
        grad_x = inner.addcmul_(unit, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.mul(x, cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation is the inverse rotation.
        return _rotated(grad, cos, -sin), None, None


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """The activation of the gate, without the product."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, -1)
        return activate(gate, activation).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (gate_up,) = ctx.saved_tensors
        activation: Activation = ctx.activation
        gate, up = gate_up.chunk(2, -1)
        grad_both = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_both.chunk(2, -1)
        torch.mul(activate(gate, activation), grad, out=grad_up)
        inner = grad * up
        if activation == "silu":
            torch.ops.aten.silu_backward.grad_input(inner, gate, grad_input=grad_gate)
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            torch.ops.aten.gelu_backward.grad_input(
                inner, gate, approximate=approximate, grad_input=grad_gate
            )
        return grad_both, None
