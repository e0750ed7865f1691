"""Sums to which a backward pass adds a weight's gradient itself, where compiled functions do so
(``functions``).

PyTorch makes each gradient in the dtype of its weight, then adds it to the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tunesmith.models.kernels.functions import Functions, which

GradientSum = Callable[[], tuple[Tensor, bool]]
"""The memory of a parameter's float32 gradient, and whether it already holds a sum."""
_PLACE = "gradient_sum"
"""The attribute in which a parameter keeps its ``GradientSum``."""


def keep_sum(parameter: nn.Parameter, kept: GradientSum) -> None:
    """Let backward passes add the parameter's gradient to ``kept`` where they can; elsewhere
    autograd returns it."""
    if which(lambda functions: functions.fits(parameter)):
        setattr(parameter, _PLACE, kept)


def kept_sums(parameters: Sequence[Tensor]) -> list[GradientSum] | None:
    """The sums to which gradients of weights ``[N, d]`` are added; None unless every weight has
    one."""
    sums = [getattr(p, _PLACE, None) for p in parameters]
    if None in sums or not all(p.requires_grad and multiplier(p) for p in parameters):
        return None
    return [kept for kept in sums if kept is not None]


def multiplier(weight: Tensor) -> Functions | None:
    """What adds the gradient of this weight to a sum."""
    return which(lambda functions: functions.multiplies(weight))


def gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``grad.T @ x``, the gradient of a weight, in its dtype."""
    functions = multiplier(weight)
    if functions is None:
        return grad.t() @ x
    whole = torch.empty_like(weight, dtype=torch.float32)
    functions.add_product(grad, x, [(whole, False)])
    return whole.to(weight.dtype)


def add_product(grad: Tensor, x: Tensor, weight: Tensor, sums: Sequence[GradientSum]) -> None:
    """Add ``grad.T @ x``, the gradient of a weight that has a ``multiplier``, to the sums of its
    rows."""
    functions = multiplier(weight)
    assert functions is not None
    functions.add_product(grad, x, [total() for total in sums])
