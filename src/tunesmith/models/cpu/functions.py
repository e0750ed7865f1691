"""What this package registers for a trainer's passes on CPUs (``kernels.functions``): operations on
bfloat16, for CPUs with AMX or AVX-512 BF16.

They compute in float32 and round their results; sums over rows are float32. Elsewhere ``lean_ops``
and others compute the same with PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from tunesmith.models.cpu import layer_functions
from tunesmith.models.cpu.native import OPERATIONS, load
from tunesmith.models.kernels.functions import AttentionParts
from tunesmith.plan.facts.instructions import cpu_flags

_allowed = True


def usable() -> bool:
    """Whether this process trains with compiled operations (``system.compile``), and this CPU and
    the compiler have them."""
    return _allowed and _compiled()


@cache
def _compiled() -> bool:
    flags = {"amx_bf16", "avx512_bf16"} & cpu_flags()
    return bool(flags) and load("train") and OPERATIONS.trains()


class CpuFunctions:
    """Compiled when a process first asks whether they take a tensor."""

    RmsNorm = layer_functions.RmsNorm
    Heads = layer_functions.TurnedHeads
    Gated = layer_functions.Gated

    @staticmethod
    def allow(compiled: bool) -> None:
        global _allowed
        _allowed = compiled

    @staticmethod
    def fits(*tensors: Tensor) -> bool:
        return (
            all(
                t.dtype == torch.bfloat16
                and t.device.type == "cpu"
                and type(t) in (Tensor, nn.Parameter)
                for t in tensors
            )
            and usable()
        )

    @staticmethod
    def multiplies(weight: Tensor) -> bool:
        whole = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
        here = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        return whole and here and usable()

    @staticmethod
    def add_product(grad: Tensor, x: Tensor, sums: Sequence[tuple[Tensor, bool]]) -> None:
        """PyTorch's backward pass would make the gradient in the dtype of the weight, then add
        it."""
        OPERATIONS.weight_gradients(grad, x, [total for total, _ in sums], [a for _, a in sums])

    @staticmethod
    def attends(query: Tensor) -> bool:
        return query.dtype == torch.bfloat16 and query.shape[2] % 32 == 0 and usable()

    @staticmethod
    def attend_backward(parts: AttentionParts) -> tuple[Tensor, Tensor, Tensor]:
        """Products round attention weights and their gradients to bfloat16."""
        rows = (parts.query, parts.key, parts.value, parts.out, parts.grad_out)
        return OPERATIONS.attention_backward(parts.table, *rows, parts.lse, parts.scale)


FUNCTIONS = CpuFunctions()
