"""Liger's functions in PyTorch: their arguments, the layouts that the kernels read, and what they
write in place.

``test_liger_kernels.py`` holds the product to the kernels themselves.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

AS_LLAMA = 0
AS_GEMMA = 1
LAUNCH = (64, 4)


class LigerInTorch:
    """The modules of ``liger_kernel.ops`` by name, and how often each function was called."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        modules = {
            "rms_norm": (rms_norm_forward, rms_norm_backward),
            "rope": (rope_forward, rope_backward),
            "swiglu": (swiglu_fused_gate_up_forward, swiglu_fused_gate_up_backward),
        }
        self._modules = {
            name: SimpleNamespace(**{f.__name__: self._counted(f) for f in functions})
            for name, functions in modules.items()
        }

    def __call__(self, name: str) -> Any:
        return self._modules[name]

    def _counted(self, function: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls[function.__name__] += 1
            return function(*arguments, **named)

        return counted


def rms_norm_forward(
    X: Tensor, W: Tensor, eps: float, offset: float, casting_mode: int, row_mode: bool | None
) -> Any:
    assert W.dim() == 1 and isinstance(offset, float) and not row_mode
    rows = X.view(-1, X.shape[-1])
    scale = rows.float().square().mean(-1).add(eps).rsqrt()
    y = rows.float() * scale[:, None]
    y = y.to(X.dtype).float() if casting_mode == AS_LLAMA else y
    return (y * (offset + W.float())).to(X.dtype).view(X.shape), rows, scale, *LAUNCH, casting_mode


def rms_norm_backward(
    dY: Tensor,
    X: Tensor,
    W: Tensor,
    RSTD: Tensor,
    offset: float,
    casting_mode: int,
    BLOCK_SIZE: int,
    num_warps: int,
    in_place: bool,
    row_mode: bool | None,
) -> tuple[Tensor, Tensor]:
    assert (BLOCK_SIZE, num_warps) == LAUNCH and not row_mode
    grad = dY.view(-1, dY.shape[-1])
    rows = torch.as_strided(
        X, grad.shape, (X.stride(0), 1), X.storage_offset()
    ).float()  # as the kernel walks
    unit = rows * RSTD[:, None]
    terms = grad.float()
    inner = terms * (W.float() + offset)
    if casting_mode == AS_LLAMA:
        terms = grad
        unit_of_weight = unit.to(X.dtype)
    else:
        unit_of_weight = unit
    grad_weight = (terms * unit_of_weight).float().sum(0).to(W.dtype)
    grad_x = (RSTD[:, None] * (inner - unit * (inner * unit).mean(-1, keepdim=True))).to(X.dtype)
    return (grad.copy_(grad_x) if in_place else grad_x).view(dY.shape), grad_weight


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """``[1, H, T, D]`` and ``[1, K, T, D]``: in place where heads come after tokens in memory."""
    tokens = q.shape[2]
    half = q.shape[3] // 2
    tables = [
        torch.as_strided(t, (tokens, 1, half), (t.stride(-2), 0, 1), t.storage_offset())
        for t in (cos, sin)
    ]
    turned: list[Tensor] = []
    for part in (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()):
        first, second = (x.to(sin.dtype) for x in part[0].clone().chunk(2, -1))
        part[0, :, :, :half] = (first * tables[0] - sign * second * tables[1]).to(part.dtype)
        part[0, :, :, half:] = (second * tables[0] + sign * first * tables[1]).to(part.dtype)
        turned.append(part.transpose(1, 2))
    return turned[0], turned[1]


def rope_forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos = cos.contiguous()
    sin = sin.contiguous()
    return *_turn(q, k, cos, sin, 1), cos, sin


def rope_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(dq, dk, cos, sin, -1)


def swiglu_fused_gate_up_forward(y: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = y.view(-1, y.shape[-1]).chunk(2, -1)
    return y, (F.silu(gate.float()).to(y.dtype) * up).view(*y.shape[:-1], y.shape[-1] // 2)


def swiglu_fused_gate_up_backward(y: Tensor, dc: Tensor, in_place: bool = False) -> Tensor:
    rows = y.view(-1, y.shape[-1])
    gate, up = (part.float() for part in rows.chunk(2, -1))
    grad = dc.view(-1, y.shape[-1] // 2).float()
    sigmoid = gate.sigmoid()
    both = torch.cat(
        (grad * (gate * sigmoid * (1 - sigmoid) + sigmoid) * up, grad * gate * sigmoid), -1
    ).to(y.dtype)
    return rows.copy_(both) if in_place else both
