"""The head at a few tokens of each row: their log-probabilities with an exact gradient, and the likeliest ones.

As in ``head``, rows are taken in chunks and backward computes a chunk's logits again, so that ``[N, V]`` is never held.

Shape legend: ``N`` rows, ``d`` hidden size, ``V`` vocabulary, ``k`` tokens of a row, ``c`` rows of a chunk.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tunesmith.models.head import LogitScale, _logits, _operand, _product, bfloat16_operands, default_chunk

PLAIN = LogitScale()


@dataclass(frozen=True, slots=True)
class Head:
    """A vocabulary head: ``weight`` ``[V, d]``, ``bias`` ``[V]``, what happens to its logits, rows at a time."""

    weight: Tensor
    bias: Tensor | None = None
    scale: LogitScale = PLAIN
    chunk: int | None = None

    def rows(self, hidden: Tensor) -> int:
        return self.chunk or default_chunk(self.weight.shape[0], hidden.device)


def logprobs_at(hidden: Tensor, head: Head, tokens: Tensor) -> Tensor:
    """``log softmax(z)[tokens]``, ``[N, k]``; gradients flow to ``hidden`` ``[N, d]``, weight and bias.

    Args:
        tokens: ``[N, k]`` int64; a token may come twice in a row.
    """
    rows = head.rows(hidden)
    return cast(Tensor, _LogprobsAt.apply(hidden, head.weight, head.bias, tokens, head.scale, rows))


@torch.no_grad()
def likeliest(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens of each row and their log-probabilities, both ``[N, k]``; without gradient."""
    exact, rows = torch.promote_types(hidden.dtype, torch.float32), head.rows(hidden)
    found = [torch.empty(len(hidden), k, dtype=t, device=hidden.device) for t in (torch.int64, exact)]
    with bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16):
        w = _operand(head.weight, exact)
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            z = _logits(_operand(hidden[at], exact), w, head.bias, head.scale)
            top = z.topk(k, -1)
            found[0][at], found[1][at] = top.indices, top.values - z.logsumexp(-1, keepdim=True)
    return found[0], found[1]


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, scale: LogitScale, rows: int
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        found = torch.empty(tokens.shape, dtype=exact, device=hidden.device)
        with bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16):
            w = _operand(weight, exact)
            for start in range(0, len(hidden), rows):
                at = slice(start, start + rows)
                z = _logits(_operand(hidden[at], exact), w, bias, scale)
                found[at] = z.gather(1, tokens[at]) - z.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.scale, ctx.rows = scale, rows
        return found

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, tokens = cast("tuple[Tensor, Tensor, Tensor | None, Tensor]", ctx.saved_tensors)
        scale, rows = cast(LogitScale, ctx.scale), cast(int, ctx.rows)
        needs = cast("tuple[bool, ...]", ctx.needs_input_grad)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        options: dict[str, Any] = {"dtype": exact, "device": hidden.device}
        grad_hidden = torch.empty(hidden.shape, **options) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, **options) if needs[1] else None
        grad_bias = torch.zeros(bias.shape, **options) if bias is not None and needs[2] else None
        with bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16):
            w = _operand(weight, exact)
            for start in range(0, len(hidden), rows):
                at = slice(start, start + rows)
                h = _operand(hidden[at], exact)
                grad = _grad_logits(_logits(h, w, bias, scale), tokens[at], grad_logprobs[at], scale)
                if grad_hidden is not None:
                    grad_hidden[at] = _product(grad, w)
                if grad_weight is not None:
                    grad_weight += _product(grad.t(), h)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        grads = zip((grad_hidden, grad_weight, grad_bias), (hidden, weight, bias), strict=True)
        return *(g.to(t.dtype) if g is not None and t is not None else None for g, t in grads), None, None, None


def _grad_logits(z: Tensor, tokens: Tensor, grad: Tensor, scale: LogitScale) -> Tensor:
    """Gradient ``[c, V]`` of the head's product: ``scatter(g) − p Σ g``, through the cap and the temperature."""
    slope = None if scale.softcap is None else 1 - (z * (scale.temperature / scale.softcap)).square_()
    found = z.softmax(-1).mul_(-grad.sum(-1, keepdim=True)).scatter_add_(1, tokens, grad)
    found.mul_(scale.factor / scale.temperature)
    return found if slope is None else found.mul_(slope)
