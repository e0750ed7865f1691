"""A lean layer's operations on few rows without gradients, one Triton kernel each.

They compute what ``lean_ops`` computes, except that rotations are rounded once.

Shape legend: ``B`` rows, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size, ``f`` feed-forward size.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.models.kernels.functions import HeadShape
from tunesmith.models.kernels.lean_ops import Activation, Operations

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
COLUMNS = 1024
"""Columns of the feed-forward block that one program computes."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """As ``lean_ops.rms_norm`` of ``[B, d]``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[1]
    _rms_norm[(len(x),)](
        x, weight, out, eps, WIDTH=width, PADDED=triton.next_power_of_2(width), OFFSET=offset
    )
    return out


def heads(
    x: Tensor, tables: tuple[Tensor, Tensor] | None, weights: Sequence[Tensor], shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``lean_ops.heads``."""
    turned = shape.heads + shape.kv_heads
    qk, v = shape.split(x, turned, shape.kv_heads)
    if tables is None and not weights:
        q, k = qk.split((shape.heads, shape.kv_heads), 1)
        return q, k, v
    size = qk.shape[-1]
    out = torch.empty(qk.shape, dtype=x.dtype, device=x.device)
    cos, sin = tables if tables is not None else (x, x)
    of_query, of_key = weights if weights else (x, x)
    _heads[(len(x), turned)](
        x, cos, sin, of_query, of_key, out, x.stride(0), shape.eps,
        HEADS=shape.heads, TURNED=turned, SIZE=size, PADDED=triton.next_power_of_2(size),
        NORMS=bool(weights), OFFSET=shape.offset, ROTATES=tables is not None,
    )  # fmt: skip
    q, k = out.split((shape.heads, shape.kv_heads), 1)
    return q, k, v


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """As ``lean_ops.gated``."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), width)
    grid = len(gate_up), triton.cdiv(width, COLUMNS)
    _gated[grid](gate_up, out, width, COLUMNS=COLUMNS, ACTIVATION=ACTIVATIONS[activation])
    return out


OPERATIONS = Operations(rms_norm, heads, gated)


@triton.jit
def _rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, PADDED)
    real = at < WIDTH
    numbers = tl.load(x + row + at, mask=real, other=0.0)
    exact = numbers.to(tl.float32)
    factor = tl.load(weight + at, mask=real, other=0.0)
    unit = exact / tl.sqrt(tl.sum(exact * exact, 0) / WIDTH + eps)
    tl.store(out + row + at, _weighted(unit, factor, numbers.dtype, OFFSET), mask=real)


@triton.jit
def _weighted(unit, factor, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """Normalized float32 numbers times the norm's weight, rounded where the model rounds."""
    if OFFSET:
        return (unit * (factor.to(tl.float32) + 1)).to(dtype)
    return (unit.to(dtype).to(tl.float32) * factor.to(tl.float32)).to(dtype)


@triton.jit
def _heads(
    x, cos, sin, of_query, of_key, out, row_stride, eps,
    HEADS: tl.constexpr, TURNED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    NORMS: tl.constexpr, OFFSET: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """One head of one row: its norm, then its rotation."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, PADDED)
    real = at < SIZE
    other = (at + SIZE // 2) % SIZE
    start = x + row * row_stride + head * SIZE
    numbers = tl.load(start + at, mask=real, other=0.0)
    partners = tl.load(start + other, mask=real, other=0.0)
    if NORMS:
        exact = numbers.to(tl.float32)
        root = tl.sqrt(tl.sum(exact * exact, 0) / SIZE + eps)
        weight = of_query if head < HEADS else of_key
        factor = tl.load(weight + at, mask=real, other=0.0)
        of_other = tl.load(weight + other, mask=real, other=0.0)
        partners = _weighted(partners.to(tl.float32) / root, of_other, numbers.dtype, OFFSET)
        numbers = _weighted(exact / root, factor, numbers.dtype, OFFSET)
    turned = numbers.to(tl.float32)
    if ROTATES:
        cosine = tl.load(cos + row * SIZE + at, mask=real, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * SIZE + at, mask=real, other=0.0).to(tl.float32)
        turned = turned * cosine + partners.to(tl.float32) * sine
    place = out + (row * TURNED + head) * SIZE + at
    tl.store(place, turned.to(numbers.dtype), mask=real)


@triton.jit
def _gated(gate_up, out, width, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = at < width
    start = gate_up + row * 2 * width
    numbers = tl.load(start + at, mask=real, other=0.0)
    gate = numbers.to(tl.float32)
    if ACTIVATION == 0:
        active = gate * tl.sigmoid(gate)
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2 * inner)  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    else:
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    up = tl.load(start + width + at, mask=real, other=0.0).to(tl.float32)
    rounded = active.to(numbers.dtype).to(tl.float32)
    tl.store(out + row * width + at, (rounded * up).to(numbers.dtype), mask=real)
