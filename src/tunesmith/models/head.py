"""The fused head: log-probabilities (and entropy) of given tokens without ever holding all logits.

Rows are taken in chunks; backward computes a chunk's logits again. Logits are float32 (float64 for float64
inputs) whatever the inputs are: rounded to bfloat16, a log-probability would be off by up to 0.03.

Shape legend: ``N`` rows, ``d`` hidden size, ``V`` vocabulary, ``c`` rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Logits of one chunk. On a CPU they should not leave the cache before they are used."""
LEAST_ROWS = 128
"""Fewer rows would read the weight more often than they use it."""


@dataclass(frozen=True, slots=True)
class LogitScale:
    """What happens between the head's product and the softmax: ``z = cap * tanh(factor * x / cap) / temperature``."""

    factor: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(z)[target]`` and the entropy of ``softmax(z)``, by row.

    ``z = (hidden @ weight.T + bias) * logit_scale``, capped by ``softcap * tanh(z / softcap)``, divided by
    ``temperature``. Gradients flow to ``hidden``, ``weight`` and ``bias`` from both results.

    Args:
        hidden: ``[N, d]``.
        weight: ``[V, d]``.
        targets: ``[N]`` int64.
        bias: ``[V]``.
        chunk: rows at a time; None chooses by ``CHUNK_BYTES``.

    Returns:
        ``[N]`` and, when asked for, ``[N]``; float32, or float64 for float64 inputs.
    """
    rows = chunk or default_chunk(weight.shape[0], hidden.device)
    scale = LogitScale(logit_scale, softcap, temperature)
    logprobs, entropies = cast(
        "tuple[Tensor, Tensor | None]",
        _FusedLogprobs.apply(hidden, weight, bias, targets, scale, rows, entropy),
    )
    return logprobs, entropies


def default_chunk(vocabulary: int, device: torch.device) -> int:
    """Rows whose float32 logits take about ``CHUNK_BYTES``."""
    return max(LEAST_ROWS, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocabulary))


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: LogitScale,
        rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        entropies = torch.empty_like(logprobs) if entropy else None
        with bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16):
            w = _operand(weight, exact)
            for start in range(0, len(hidden), rows):
                at = slice(start, start + rows)
                z = _logits(_operand(hidden[at], exact), w, bias, scale)
                logp = z.log_softmax(-1)
                logprobs[at] = logp.gather(1, targets[at, None])[:, 0]
                if entropies is not None:
                    entropies[at] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.scale, ctx.rows = scale, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = cast("tuple[Tensor, Tensor, Tensor | None, Tensor]", ctx.saved_tensors)
        scale, rows, needs = (
            cast(LogitScale, ctx.scale),
            cast(int, ctx.rows),
            cast("tuple[bool, ...]", ctx.needs_input_grad),
        )
        exact = torch.promote_types(hidden.dtype, torch.float32)
        options: dict[str, Any] = {"dtype": exact, "device": hidden.device}
        grad_hidden = torch.empty(hidden.shape, **options) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, **options) if needs[1] else None
        grad_bias = torch.zeros(bias.shape, **options) if bias is not None and needs[2] else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(hidden), **options)
        with bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16):
            w = _operand(weight, exact)
            for start in range(0, len(hidden), rows):
                at = slice(start, start + rows)
                h = _operand(hidden[at], exact)
                grad, row_factor = _grad_logits(
                    _logits(h, w, bias, scale),
                    targets[at],
                    grad_logprobs[at],
                    None if grad_entropy is None else grad_entropy[at],
                    scale,
                )
                if grad_hidden is not None:
                    torch.mul(_product(grad, w), row_factor, out=grad_hidden[at])
                if grad_weight is not None:
                    grad_weight += _product(grad.t(), h * row_factor.to(h.dtype))
                if grad_bias is not None:
                    grad_bias.add_((grad * row_factor).sum(0))
        grads = zip((grad_hidden, grad_weight, grad_bias), (hidden, weight, bias), strict=True)
        return *(g.to(t.dtype) if g is not None and t is not None else None for g, t in grads), None, None, None, None


def _operand(t: Tensor, exact: torch.dtype) -> Tensor:
    """On a CPU, products of bfloat16 values with a float32 result take float32 operands (see below)."""
    return t.to(exact) if t.device.type == "cpu" else t


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in at least float32, with ``a`` rounded to what ``b`` is."""
    exact = torch.promote_types(b.dtype, torch.float32)
    return a @ b if b.dtype == exact else torch.mm(a.to(b.dtype), b, out_dtype=exact)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: LogitScale) -> Tensor:
    """What the softmax is taken of: ``[c, V]``, in at least float32."""
    z = _product(hidden, weight.t())
    if bias is not None:
        z += bias
    if scale.softcap is not None:
        return z.mul_(scale.factor / scale.softcap).tanh_().mul_(scale.softcap / scale.temperature)
    factor = scale.factor / scale.temperature
    return z if factor == 1 else z.mul_(factor)


def _grad_logits(
    z: Tensor, targets: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None, scale: LogitScale
) -> tuple[Tensor, Tensor]:
    """Gradient of the head's product ``[c, V]``, still to be multiplied by row factors ``[c, 1]``.

    A factor per row is cheaper on what follows the product with the weight than on ``[c, V]``.
    d logp/dz = onehot - p; dH/dz = -p (log p + H); d tanh cap = 1 - (capped / cap)^2.
    """
    factor = scale.factor / scale.temperature
    slope = None if scale.softcap is None else 1 - (z * (scale.temperature / scale.softcap)).square_()
    place = targets[:, None]
    if grad_entropy is None:
        grad = z.softmax(-1)
        grad.scatter_add_(1, place, torch.full_like(place, -1, dtype=grad.dtype))
        row_factor = grad_logprobs[:, None] * -factor
    else:
        logp = z.log_softmax(-1)
        p = logp.exp()
        entropy = -(p * logp).sum(-1, keepdim=True)
        grad = p.mul_(logp.add_(entropy).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]))
        grad.scatter_add_(1, place, grad_logprobs[:, None].to(grad.dtype))
        row_factor = torch.full_like(entropy, factor)
    return (grad if slope is None else grad.mul_(slope)), row_factor


@contextmanager
def bfloat16_operands(wanted: bool) -> Generator[None]:
    """Let float32 products on a CPU multiply in bfloat16: exact where both operands were bfloat16 before.

    A plain bfloat16 product rounds its result to bfloat16 as well; this way nothing is lost, at the same
    speed. Gradients of the logits are rounded to bfloat16 as any bfloat16 backward does.
    """
    settings = cast(Any, torch.backends.mkldnn).matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16" if wanted else before
    try:
        yield
    finally:
        settings.fp32_precision = before
