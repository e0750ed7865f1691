"""What this package registers for a trainer's passes on CPUs (``kernels.functions``): a layer's
operations beside products on float32 and bfloat16, for any CPU; products of float32 for CPUs with
AVX2 and AMD's with AVX-512; and for CPUs with AMX or AVX-512 BF16 products of bfloat16 with a
float32 result, which are the head's and gradients of weights.

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
from tunesmith.models.kernels.precision import rounds_operands
from tunesmith.plan.facts.instructions import Level, highest

_allowed = True


ROWS = (torch.float32, torch.bfloat16)
"""Types of the rows that a layer's operations take."""
MANY = 64
"""Rows from which on a product brings its weight into panels."""


def usable() -> bool:
    """Whether this process trains with compiled operations (``system.compile``), and a compiler is
    there."""
    return _allowed and load("train")


def multiplies_narrow() -> bool:
    """Whether this CPU has the operations with products of bfloat16."""
    return usable() and _narrow()


@cache
def _many() -> bool:
    """Whether products of float32 are faster here than PyTorch's."""
    return OPERATIONS.multiplies_many()


@cache
def _narrow() -> bool:
    return OPERATIONS.multiplies_narrow()


@cache
def _without_narrow() -> bool:
    """Whether this CPU has no instructions for bfloat16: PyTorch's products then take twenty times
    as long as those of float32."""
    return highest() < Level.PAIRS


@cache
def _without_tiles() -> bool:
    """Whether PyTorch's attention in bfloat16 takes longer than ours in float32."""
    return highest() < Level.TILES


def _widened(dtype: torch.dtype) -> bool:
    """Whether products of this type are computed here, in float32."""
    return _many() and (dtype == torch.float32 or _without_narrow())


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
        rows = tensors[0].dtype

        def fits(t: Tensor) -> bool:
            return type(t) in (Tensor, nn.Parameter) and t.dtype == rows and t.device.type == "cpu"

        return rows in ROWS and all(map(fits, tensors)) and usable()

    @staticmethod
    def multiplies_rows(x: Tensor, weight: Tensor) -> bool:
        many = x.dim() == 2 and len(x) >= MANY
        if not many or not CpuFunctions.fits(x, weight) or not _widened(x.dtype):
            return False
        # PyTorch's products of bfloat16 operands are faster, where there are any.
        return _without_narrow() or not rounds_operands()

    @staticmethod
    def product(x: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
        return OPERATIONS.multiply_rows(x.float(), weight.float(), turned).to(x.dtype)

    @staticmethod
    def multiplies_bfloat16(weight: Tensor) -> bool:
        whole = weight.shape[0] % 32 == 0 and weight.shape[1] % 32 == 0
        here = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        return whole and here and multiplies_narrow()

    @staticmethod
    def bfloat16_product(x: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
        return OPERATIONS.multiply_pairs(x, weight, turned)

    @staticmethod
    def multiplies(weight: Tensor) -> bool:
        if weight.dtype == torch.float32:
            return CpuFunctions.fits(weight) and _many()
        whole = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
        here = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        return whole and here and (multiplies_narrow() or (usable() and _widened(weight.dtype)))

    @staticmethod
    def add_product(grad: Tensor, x: Tensor, sums: Sequence[tuple[Tensor, bool]]) -> None:
        """PyTorch's backward pass would make the gradient in the dtype of the weight, then add
        it."""
        if _widened(x.dtype):
            grad = grad.float()
            x = x.float()
        OPERATIONS.weight_gradients(grad, x, [total for total, _ in sums], [a for _, a in sums])

    @staticmethod
    def attends(query: Tensor) -> bool:
        here = query.dtype == torch.float32 or _without_tiles()
        return here and CpuFunctions.attends_backward(query)

    @staticmethod
    def attend(
        table: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows = (t.float() for t in (query, key, value))
        return OPERATIONS.attend_forest(table, *rows, scale)

    @staticmethod
    def attends_backward(query: Tensor) -> bool:
        return query.dtype in ROWS and usable() and query.shape[2] % OPERATIONS.panel() == 0

    @staticmethod
    def attend_backward(parts: AttentionParts) -> tuple[Tensor, Tensor, Tensor]:
        """Products of bfloat16 round attention weights and their gradients to bfloat16."""
        rows = (parts.query, parts.key, parts.value, parts.out, parts.grad_out)
        dtype = parts.query.dtype
        if dtype == torch.bfloat16 and parts.query.shape[2] % 32 == 0 and multiplies_narrow():
            return OPERATIONS.attention_backward(parts.table, *rows, parts.lse, parts.scale)
        wide = (t.float() for t in rows)
        query, *others = OPERATIONS.attend_forest_backward(
            parts.table, *wide, parts.lse, parts.scale
        )
        kv_heads = parts.key.shape[1]
        key, value = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in others)
        return query.to(dtype), key.to(dtype), value.to(dtype)


FUNCTIONS = CpuFunctions()
