"""Reductions of logits and their gradients, in Triton.

Shape legend: ``c`` rows, ``v`` vocabulary tokens.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.models.kernels.logits import RowGradient

CHUNK = 8192
COLUMNS = 4096


def sums(logits: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """See ``LogitKernels``."""
    total = logits.new_empty(len(logits))
    of_softmax = torch.empty_like(total) if entropy else None
    _sums[(len(logits),)](
        logits, total, total if of_softmax is None else of_softmax, logits.shape[1],
        ENTROPY=entropy, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return total, of_softmax


def gradients(logits: Tensor, total: Tensor, of: RowGradient, dtype: torch.dtype) -> Tensor:
    """See ``LogitKernels``."""
    out = torch.empty_like(logits, dtype=dtype)
    slope = of.constant if of.slope is None else of.slope
    per_row = (t.contiguous() for t in (total, of.constant, slope, of.at_token, of.token))
    grid = len(logits), triton.cdiv(logits.shape[1], COLUMNS)
    _gradients[grid](
        logits, out, *per_row, logits.shape[1], SLOPE=of.slope is not None, COLUMNS=COLUMNS
    )
    return out


@triton.jit
def _sums(logits, total, entropy, width, ENTROPY: tl.constexpr, CHUNK: tl.constexpr):
    """The logsumexp and the entropy of one row. The entropy is ``log s`` plus the mean of ``most -
    z``, with ``s`` the sum of ``exp(z - most)``: both terms are small where the entropy is
    small."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    below = tl.zeros((), tl.float32)  # the sum of exp(z - most) (z - most)
    for at in range(0, width, CHUNK):
        index = at + tl.arange(0, CHUNK)
        real = index < width
        z = tl.load(logits + row * width + index, mask=real, other=float("-inf"))
        top = tl.maximum(most, tl.max(z, 0))
        shares = tl.exp(z - top)
        shrink = tl.exp(most - top)
        if ENTROPY:
            moved = tl.where(weight > 0, below + weight * (most - top), 0.0)
            distance = tl.where(shares > 0, shares * (z - top), 0.0)
            below = shrink * moved + tl.sum(distance, 0)
        weight = shrink * weight + tl.sum(shares, 0)
        most = top
    log = tl.log(weight)
    tl.store(total + row, most + log)
    if ENTROPY:
        tl.store(entropy + row, log - below / weight)


@triton.jit
def _gradients(
    logits, out, total, constant, slope, at_token, token, width,
    SLOPE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = index < width
    log = tl.load(logits + row * width + index, mask=real, other=0.0) - tl.load(total + row)
    factor = tl.load(constant + row)
    if SLOPE:
        factor += tl.load(slope + row) * log
    grad = tl.exp(log) * factor
    grad += tl.where(index == tl.load(token + row), tl.load(at_token + row), 0.0)
    tl.store(out + row * width + index, grad.to(out.dtype.element_ty), mask=real)
