"""Gradients of weights, added in float32 where the optimizer keeps their sum, without a copy in the weights' type.

PyTorch's backward pass makes each gradient in the type of its weight, which is then added to the sum. On a CPU with AMX
or AVX-512 BF16 a compiled function (``native``) multiplies in bfloat16 and adds to the sum itself.

Shape legend: ``T`` rows, ``N`` outputs, ``K`` inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tunesmith.models.training_functions import Sum, functions

GradientSum = Callable[[], tuple[Tensor, bool]]
"""The memory of a parameter's float32 gradient, and whether it holds a sum already."""
_PLACE = "gradient_sum"
"""The attribute of a parameter that has one."""


def keep_sum(parameter: nn.Parameter, kept: GradientSum) -> None:
    """Let backward passes add the parameter's gradient to ``kept`` where they can; elsewhere autograd gives it."""
    if parameter.device.type == "cpu" and parameter.dtype == torch.bfloat16 and functions() is not None:
        setattr(parameter, _PLACE, kept)


def kept_sums(parameters: Sequence[Tensor]) -> list[GradientSum] | None:
    """Where the gradients of weights ``[N, K]`` are added; None unless all of them have such a place."""
    found = [getattr(p, _PLACE, None) for p in parameters]
    fits = all(p.requires_grad and multiplies(p) for p in parameters)
    return [kept for kept in found if kept is not None] if fits and None not in found else None


def multiplies(weight: Tensor) -> bool:
    """Whether ``add_product`` computes the gradient of this weight."""
    whole = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return whole and weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and functions() is not None


def add_product(grad: Tensor, x: Tensor, sums: Sequence[tuple[Tensor, bool]]) -> None:
    """``grad.T @ x`` replaces or is added to float32 sums.

    Args:
        grad: bfloat16 ``[T, N]``.
        x: bfloat16 ``[T, K]``.
        sums: the rows of the product, one after the other, and whether to add to what they hold; contiguous.
    """
    grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
    parts = (Sum * len(sums))(*(Sum(total.data_ptr(), len(total), adds) for total, adds in sums))
    functions().tunesmith_weight_gradient(
        len(x), x.shape[1], grad.data_ptr(), grad.stride(0), x.data_ptr(), x.stride(0), parts, len(sums),
        torch.get_num_threads(),
    )  # fmt: skip
