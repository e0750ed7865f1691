"""The fused head: log-probabilities and entropies without holding all logits in memory at once.

Logits are computed in tiles of some rows and some tokens of the vocabulary, and recomputed in the
backward pass. All rows of a vocabulary slice come before the next slice, so its weights stay in the
cache and its gradient is completed in one go. Logits are float32 for inputs of up to 32 bits and
float64 for float64: rounded to bfloat16, a log-probability would be off by up to 0.03.

Shape legend: ``N`` rows, ``d`` hidden size, ``V`` vocabulary, ``k`` tokens per row, ``c`` rows and
``v`` vocabulary tokens per tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.costs import chunk_rows, chunk_words
from tunesmith.models.kernels.functions import Functions, product, which
from tunesmith.models.kernels.gradient_sums import kept_sums, multiplier
from tunesmith.models.kernels.logits import RowGradient, logit_kernels
from tunesmith.models.kernels.precision import bfloat16_operands


@dataclass(frozen=True, slots=True)
class LogitScale:
    """The scaling of the head's product ``x`` to logits: ``z = cap * tanh(factor * x / cap) /
    temperature``."""

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
    """Rows per tile; None: by ``plan.cost.operations.chunk_rows``."""

    def rows(self, hidden: Tensor) -> Iterator[slice]:
        """The rows of each tile."""
        return _slices(len(hidden), self.chunk or chunk_rows(len(self.weight), hidden.device.type))

    def words(self) -> Iterator[slice]:
        """The vocabulary tokens of each tile."""
        return _slices(len(self.weight), chunk_words(len(self.weight), self.weight.device.type))


def fused_logprobs(
    hidden: Tensor, head: Head, tokens: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(z)[token]`` and the entropy of ``softmax(z)``, per row.

    Gradients flow to ``hidden`` and to the head's weight and bias from both results.

    Args:
        hidden: ``[N, d]``.
        tokens: int64 ``[N]`` or ``[N, k]``; a row may repeat a token.
        entropy: whether to compute the entropy; without it the second result is None.

    Returns:
        Log-probabilities in the shape of ``tokens``, and entropies ``[N]``; float32, or float64 for
        float64 inputs.
    """
    wanted = tokens if tokens.dim() == 2 else tokens[:, None]
    results: tuple[Tensor, Tensor | None] = _FusedLogprobs.apply(
        hidden, head.weight, head.bias, wanted, head, entropy
    )
    logprobs, entropies = results
    return logprobs.view(tokens.shape), entropies


@torch.no_grad()
def likeliest(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` most likely tokens of each row and their log-probabilities, both ``[N, k]``,
    without gradient."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    tokens = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logits = torch.full(
        tokens.shape, -torch.inf, dtype=exact, device=hidden.device
    )  # the top k so far
    total = logits.new_full((len(hidden), 1), -torch.inf)
    with _bfloat16_inputs(hidden):
        for words, h, w in _operands(hidden, head.weight, head, exact):
            b = None if head.bias is None else head.bias[words]
            for at in head.rows(hidden):
                z = _logits(h[at], w, b, head.scale)
                total[at] = torch.logaddexp(total[at], z.logsumexp(-1, keepdim=True))
                top = z.topk(min(k, len(w)), -1)
                known = torch.cat((tokens[at], top.indices + words.start), -1)
                logits[at], places = torch.cat((logits[at], top.values), -1).topk(k, -1)
                tokens[at] = known.gather(-1, places)
    return tokens, logits - total


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        head: Head,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        picked = torch.zeros(tokens.shape, dtype=exact, device=hidden.device)
        total = picked.new_full((len(hidden),), -torch.inf)  # logsumexp over the vocabulary so far
        entropies = torch.zeros_like(total) if entropy else None  # over the vocabulary so far
        with _bfloat16_inputs(hidden):
            for words, h, w in _operands(hidden, weight, head, exact):
                b = None if bias is None else bias[words]
                for at in head.rows(hidden):
                    z = _logits(h[at], w, b, head.scale)
                    index, here = _among(tokens[at], words)
                    picked[at] += z.gather(1, index).mul_(here)
                    part, of_part = _sums(z, entropy=entropy)
                    if entropies is not None and of_part is not None:
                        share = _log_odds(part, total[at])
                        entropies[at].lerp_(of_part, share.sigmoid()).add_(_binary_entropy(share))
                    torch.logaddexp(total[at], part, out=total[at])
        ctx.save_for_backward(hidden, weight, bias, tokens, total, entropies)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return picked - total[:, None], entropies

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, total, entropies = ctx.saved_tensors
        head: Head = ctx.head
        needs: tuple[bool, ...] = ctx.needs_input_grad
        exact = torch.promote_types(hidden.dtype, torch.float32)
        options: dict[str, Any] = {"dtype": exact, "device": hidden.device}
        grad_hidden = torch.zeros(hidden.shape, **options) if needs[0] else None
        kept = kept_sums([weight])  # if set, the gradient is added there and not returned
        whole, adds = kept[0]() if kept else (None, False)
        grad_weight = torch.empty_like(weight) if needs[1] and whole is None else None
        grad_bias = torch.empty_like(bias) if needs[2] else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(tokens.shape, **options)
        with _bfloat16_inputs(hidden):
            for words, h, w in _operands(hidden, weight, head, exact):
                b = None if bias is None else bias[words]
                sum_weight = None
                if whole is not None:
                    sum_weight = whole[words] if adds else whole[words].zero_()
                elif needs[1]:
                    sum_weight = torch.zeros(w.shape, **options)
                sum_bias = torch.zeros(len(w), **options) if needs[2] else None
                for at in head.rows(hidden):
                    towards = None
                    if grad_entropy is not None:
                        towards = (entropies[at, None], grad_entropy[at, None])
                    grad, row_factor = _grad_logits(
                        _logits(h[at], w, b, head.scale),
                        total[at, None],
                        _among(tokens[at], words),
                        grad_logprobs[at],
                        towards,
                        head.scale,
                        w.dtype,
                    )
                    if sum_bias is not None:
                        sum_bias += (grad * row_factor).sum(0)
                    grad = grad.to(w.dtype)
                    if grad_hidden is not None:
                        grad_hidden[at].addcmul_(_product(grad, w), row_factor)
                    functions = multiplier(weight[words])
                    if sum_weight is not None and functions is not None:
                        rows = (h[at] * row_factor).to(weight.dtype)
                        functions.add_product(grad.to(weight.dtype), rows, [(sum_weight, True)])
                    elif sum_weight is not None:
                        _add_product(sum_weight, grad.t(), h[at] * row_factor.to(h.dtype))
                if grad_weight is not None and sum_weight is not None:
                    grad_weight[words] = sum_weight
                if grad_bias is not None and sum_bias is not None:
                    grad_bias[words] = sum_bias
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _among(tokens: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """The indices of tokens within a vocabulary slice, and whether they are in it, both ``[c,
    k]``."""
    places = tokens - words.start
    return places.clamp(0, words.stop - words.start - 1), (places >= 0) & (tokens < words.stop)


def _operands(
    hidden: Tensor, weight: Tensor, head: Head, exact: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each slice of the vocabulary, with the operands of its products. On a CPU, PyTorch's products
    of bfloat16 values with a float32 result need float32 operands (``bfloat16_operands``)."""
    wide: Tensor | None = None
    for words in head.words():
        own = weight[words]
        alike = hidden.dtype == own.dtype
        if own.device.type != "cpu" or (alike and _bfloat16_multiplier(own)):
            yield words, hidden, own
            continue
        wide = hidden.to(exact) if wide is None else wide
        yield words, wide, own.to(exact)


def _bfloat16_multiplier(weight: Tensor) -> Functions | None:
    """What multiplies it with rows of bfloat16 on a CPU."""
    return which(lambda functions: functions.multiplies_bfloat16(weight))


def _product(a: Tensor, b: Tensor, *, turned: bool = True) -> Tensor:
    """``a @ b``, or ``a @ b.T`` unless it is turned, in at least float32, with ``a`` rounded to the
    dtype of ``b``."""
    exact = torch.promote_types(b.dtype, torch.float32)
    if b.dtype == exact:
        return product(a, b, turned=turned)
    functions = _bfloat16_multiplier(b)
    if functions is not None:
        return functions.bfloat16_product(a.to(b.dtype), b, turned=turned)
    return torch.mm(a.to(b.dtype), b if turned else b.t(), out_dtype=exact)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, on a GPU within the product."""
    if total.is_cuda and b.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, a.to(b.dtype), b, total.dtype, out=total)
    else:
        total += _product(a, b)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: LogitScale) -> Tensor:
    """The logits ``[c, v]``, in at least float32."""
    z = _product(hidden, weight, turned=False)
    if bias is not None:
        z += bias
    if scale.softcap is not None:
        return z.mul_(scale.factor / scale.softcap).tanh_().mul_(scale.softcap / scale.temperature)
    factor = scale.factor / scale.temperature
    return z if factor == 1 else z.mul_(factor)


def _sums(z: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """``logsumexp(z)`` and the entropy of ``softmax(z)``, both ``[c]``; may overwrite the logits
    ``[c, v]``.

    With ``s`` the sum of ``exp(z - max)``, the entropy is ``log s`` plus the mean of ``max - z``:
    both are small where the entropy is. Logsumexp minus the mean logit is the same, but cancels for
    a distribution with one likely token.
    """
    kernels = logit_kernels(z)
    if kernels is not None:
        return kernels.sums(z, entropy=entropy)
    if not entropy:
        return z.logsumexp(-1), None
    most = z.amax(-1, keepdim=True)
    weights = z.sub_(most).exp()
    whole = weights.sum(-1)
    log = whole.log()
    return most[:, 0] + log, log - torch.linalg.vecdot(weights, z) / whole


def _log_odds(part: Tensor, rest: Tensor) -> Tensor:
    """The log-odds of a part of the vocabulary, from its logsumexp and that of the rest, which is
    -inf before the first part."""
    return (part - rest).clamp_(-100, 100)


def _binary_entropy(log_odds: Tensor) -> Tensor:
    """The entropy of which of two parts a token is in: ``softplus(-a) + a sigmoid(-a)``, for ``a >=
    0``."""
    a = log_odds.abs()
    return F.softplus(-a) + a * torch.sigmoid(-a)


def _grad_logits(
    z: Tensor,
    total: Tensor,
    among: tuple[Tensor, Tensor],
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    scale: LogitScale,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradient of the head's product ``[c, v]``, which may be written over the logits, and the
    factors of its rows ``[c, 1]``.

    d logp/dz = onehot - p; dH/dz = -p (log p + H); d tanh cap = 1 - (capped / cap)^2.

    Args:
        total: logsumexp of the logits over the vocabulary, ``[c, 1]``.
        among: the result of ``_among`` for the tokens.
        grad_logprobs: ``[c, k]``.
        entropy: the entropies and their gradients, ``[c, 1]`` each.
        dtype: of the operand of the products that follow; the gradient has it, or a wider one.
    """
    factor = scale.factor / scale.temperature
    kernels = logit_kernels(z) if scale.softcap is None and among[0].shape[1] == 1 else None
    if kernels is not None:
        of, row_factor = _row_gradient(among, grad_logprobs, entropy, factor)
        return kernels.gradients(z, total[:, 0], of, dtype), row_factor
    slope = None
    if scale.softcap is not None:
        slope = 1 - (z * (scale.temperature / scale.softcap)).square_()
    places, here = among
    logp = z.sub_(total)
    if entropy is None and places.shape[1] == 1:
        # The factors are applied after the product with the weight, to ``[c, d]`` instead of ``[c,
        # v]``.
        grad = logp.exp_()
        onto = -here.to(z.dtype)
        row_factor = grad_logprobs * -factor
    else:
        towards = -grad_logprobs.sum(-1, keepdim=True)
        onto = grad_logprobs * here
        row_factor = torch.full_like(towards, factor)
        if entropy is None:
            grad = logp.exp_().mul_(towards)
        else:
            of, grad_of = entropy
            p = logp.exp()
            grad = p.mul_(logp.add_(of).mul_(-grad_of).add_(towards))
    grad.scatter_add_(1, places, onto.to(grad.dtype))
    return (grad if slope is None else grad.mul_(slope)), row_factor


def _row_gradient(
    among: tuple[Tensor, Tensor],
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    factor: float,
) -> tuple[RowGradient, Tensor]:
    """As ``_grad_logits``, for one token per row."""
    token, here = (t[:, 0] for t in among)
    if entropy is None:
        one = torch.ones_like(grad_logprobs[:, 0])
        return RowGradient(one, None, -here.to(one.dtype), token), grad_logprobs * -factor
    of, grad_of = (t[:, 0] for t in entropy)
    upstream = grad_logprobs[:, 0]
    gradient = RowGradient(-upstream - grad_of * of, -grad_of, upstream * here, token)
    return gradient, torch.full_like(grad_logprobs, factor)


def _bfloat16_inputs(hidden: Tensor) -> AbstractContextManager[None]:
    return bfloat16_operands(hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16)
