"""Weight gradients, added in float32 directly to the optimizer's sum, without a copy in the
weights' dtype.

PyTorch's backward pass makes each gradient in the dtype of its weight, then adds it to the sum. On
a CPU with AMX or AVX-512 BF16 a compiled function (``kernels.native``) multiplies in bfloat16 and
adds to the sum itself.

Shape legend: ``T`` rows, ``N`` outputs, ``K`` inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tunesmith.models.cpu.training_functions import Sum, functions


def multiplies(weight: Tensor) -> bool:
    """Whether ``add_product`` computes the gradient of this weight."""
    whole = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return (
        whole
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and functions() is not None
    )


def add_product(grad: Tensor, x: Tensor, sums: Sequence[tuple[Tensor, bool]]) -> None:
    """Write ``grad.T @ x`` to float32 sums, or add it to them.

    Args:
        grad: bfloat16 ``[T, N]``.
        x: bfloat16 ``[T, K]``.
        sums: contiguous blocks of the product's rows, in order, and whether to add to each block or
            overwrite it.
    """
    grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
    parts = (Sum * len(sums))(*(Sum(total.data_ptr(), len(total), adds) for total, adds in sums))
    functions().tunesmith_weight_gradient(
        len(x), x.shape[1], grad.data_ptr(), grad.stride(0), x.data_ptr(), x.stride(0), parts, len(sums),
        torch.get_num_threads(),
    )  # fmt: skip
