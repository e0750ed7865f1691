"""The fused head: log-probabilities and entropies without all logits in memory at once.

Rows are processed in chunks; backward computes a chunk's logits again. Logits are float32 for inputs of up to 32 bits
and float64 for float64: rounded to bfloat16, a log-probability would be off by up to 0.03.

Shape legend: ``N`` rows, ``d`` hidden size, ``V`` vocabulary, ``k`` tokens of a row, ``c`` rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from tunesmith.plan.cost import chunk_rows


@dataclass(frozen=True, slots=True)
class LogitScale:
    """From the head's product ``x`` to logits: ``z = cap * tanh(factor * x / cap) / temperature``."""

    factor: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


PLAIN = LogitScale()


@dataclass(frozen=True, slots=True)
class Head:
    """A vocabulary head."""

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]
    scale: LogitScale = PLAIN
    chunk: int | None = None
    """Rows per chunk; None: by ``plan.cost.chunk_rows``."""

    def rows(self, hidden: Tensor) -> int:
        return self.chunk or chunk_rows(self.weight.shape[0], hidden.device.type)


def fused_logprobs(
    hidden: Tensor, head: Head, tokens: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(z)[token]`` and the entropy of ``softmax(z)``, by row.

    Gradients flow to ``hidden`` and to the head's weight and bias from both results.

    Args:
        hidden: ``[N, d]``.
        tokens: int64 ``[N]`` or ``[N, k]``; a row may have a token twice.
        entropy: whether to compute the entropy; without it the second result is None.

    Returns:
        Log-probabilities in the shape of ``tokens``, and entropies ``[N]``; float32, or float64 for float64 inputs.
    """
    wanted = tokens if tokens.dim() == 2 else tokens[:, None]
    logprobs, entropies = cast(
        "tuple[Tensor, Tensor | None]",
        _FusedLogprobs.apply(hidden, head.weight, head.bias, wanted, head.scale, head.rows(hidden), entropy),
    )
    return logprobs.view(tokens.shape), entropies


@torch.no_grad()
def likeliest(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens of each row and their log-probabilities, both ``[N, k]``, without gradient."""
    exact, rows = torch.promote_types(hidden.dtype, torch.float32), head.rows(hidden)
    tokens, logprobs = (torch.empty(len(hidden), k, dtype=t, device=hidden.device) for t in (torch.int64, exact))
    with _bfloat16_inputs(hidden):
        w = _operand(head.weight, exact)
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            z = _logits(_operand(hidden[at], exact), w, head.bias, head.scale)
            top = z.topk(k, -1)
            tokens[at], logprobs[at] = top.indices, top.values - z.logsumexp(-1, keepdim=True)
    return tokens, logprobs


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        scale: LogitScale,
        rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(tokens.shape, dtype=exact, device=hidden.device)
        entropies = logprobs.new_empty(len(hidden)) if entropy else None
        with _bfloat16_inputs(hidden):
            w = _operand(weight, exact)
            for start in range(0, len(hidden), rows):
                at = slice(start, start + rows)
                logp = _logits(_operand(hidden[at], exact), w, bias, scale).log_softmax(-1)
                logprobs[at] = logp.gather(1, tokens[at])
                if entropies is not None:
                    entropies[at] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.scale, ctx.rows = scale, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens = cast("tuple[Tensor, Tensor, Tensor | None, Tensor]", ctx.saved_tensors)
        scale, rows = cast(LogitScale, ctx.scale), cast(int, ctx.rows)
        needs = cast("tuple[bool, ...]", ctx.needs_input_grad)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        options: dict[str, Any] = {"dtype": exact, "device": hidden.device}
        grad_hidden = torch.empty(hidden.shape, **options) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, **options) if needs[1] else None
        grad_bias = torch.zeros(bias.shape, **options) if bias is not None and needs[2] else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(tokens.shape, **options)
        with _bfloat16_inputs(hidden):
            w = _operand(weight, exact)
            for start in range(0, len(hidden), rows):
                at = slice(start, start + rows)
                h = _operand(hidden[at], exact)
                grad, row_factor = _grad_logits(
                    _logits(h, w, bias, scale),
                    tokens[at],
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
    """On a CPU, products of bfloat16 values with a float32 result need float32 operands (``bfloat16_operands``)."""
    return t.to(exact) if t.device.type == "cpu" else t


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in at least float32, with ``a`` rounded to the dtype of ``b``."""
    exact = torch.promote_types(b.dtype, torch.float32)
    return a @ b if b.dtype == exact else torch.mm(a.to(b.dtype), b, out_dtype=exact)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: LogitScale) -> Tensor:
    """The logits ``[c, V]``, in at least float32."""
    z = _product(hidden, weight.t())
    if bias is not None:
        z += bias
    if scale.softcap is not None:
        return z.mul_(scale.factor / scale.softcap).tanh_().mul_(scale.softcap / scale.temperature)
    factor = scale.factor / scale.temperature
    return z if factor == 1 else z.mul_(factor)


def _grad_logits(
    z: Tensor, tokens: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None, scale: LogitScale
) -> tuple[Tensor, Tensor]:
    """Gradient of the head's product ``[c, V]``, and the factors of its rows ``[c, 1]``.

    d logp/dz = onehot - p; dH/dz = -p (log p + H); d tanh cap = 1 - (capped / cap)^2.
    """
    factor = scale.factor / scale.temperature
    slope = None if scale.softcap is None else 1 - (z * (scale.temperature / scale.softcap)).square_()
    if grad_entropy is None and tokens.shape[1] == 1:
        # The factors are applied after the product with the weight, to ``[c, d]`` instead of ``[c, V]``.
        grad = z.softmax(-1)
        grad.scatter_add_(1, tokens, torch.full_like(tokens, -1, dtype=grad.dtype))
        row_factor = grad_logprobs * -factor
    else:
        towards = -grad_logprobs.sum(-1, keepdim=True)
        row_factor = torch.full_like(towards, factor)
        if grad_entropy is None:
            grad = z.softmax(-1).mul_(towards)
        else:
            logp = z.log_softmax(-1)
            p = logp.exp()
            entropy = -(p * logp).sum(-1, keepdim=True)
            grad = p.mul_(logp.add_(entropy).mul_(-grad_entropy[:, None]).add_(towards))
        grad.scatter_add_(1, tokens, grad_logprobs.to(grad.dtype))
    return (grad if slope is None else grad.mul_(slope)), row_factor


def _bfloat16_inputs(hidden: Tensor) -> AbstractContextManager[None]:
    return bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16)


class _Products:
    """The precision of float32 products, a setting of the process: threads share it and the last one restores it."""

    lock, users, precision = Lock(), 0, ""

    @classmethod
    def add(cls, users: int) -> None:
        settings = cast(Any, torch.backends.mkldnn).matmul
        with cls.lock:
            if not cls.users:
                cls.precision = settings.fp32_precision
            cls.users += users
            settings.fp32_precision = "bf16" if cls.users else cls.precision


@contextmanager
def bfloat16_operands(wanted: bool) -> Generator[None]:
    """Float32 products on a CPU round their operands to bfloat16: exact if both hold bfloat16 values.

    A bfloat16 product would also round its result; this is as fast and does not. Gradients of the logits are rounded
    to bfloat16, as in any bfloat16 backward. Float32 products of other threads are rounded too in the meantime.
    """
    _Products.add(int(wanted))
    try:
        yield
    finally:
        _Products.add(-int(wanted))
