"""The port of functions that are compiled for a processor, for operations of a trainer's passes.

``lean_ops``, ``head``, ``cpu_attention`` and ``gradient_sums`` ask for them and compute with
PyTorch's operations where there are none. They register at a door (``config.doors``); ``cpu`` has
those for CPUs.

Shape legend: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``N``
outputs, ``d`` inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.config.doors import Door

Product = Callable[[Tensor], Tensor]
"""``[T, d]`` to ``[T, N]``, without gradients."""


@runtime_checkable
class TakesAdapter(Protocol):
    """A ``Product`` that computes an adapter with it."""

    def adapted(self, down: Tensor, up: Tensor) -> Product:
        """The product with ``up(down(x))`` added: ``[R, d]`` and ``[N, R]``, float32."""
        ...


Prepare = Callable[[Tensor, "Tensor | None"], Product]
"""Makes a ``Product`` from a weight ``[N, d]`` and a bias ``[N]``."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head counts of a layer's queries, keys and values, and the settings of their norms."""

    heads: int
    kv_heads: int
    eps: float = 0.0
    offset: bool = False

    def split(self, product: Tensor, *counts: int) -> tuple[Tensor, ...]:
        """Split the joint product ``[T, (H + 2 K) D]`` into parts with these counts of heads, each
        ``[T, count, D]``."""
        every = self.heads + 2 * self.kv_heads
        return product.view(len(product), every, product.shape[1] // every).split(counts, 1)


class _Forgetting:
    """The context of a forward pass without a backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save nothing."""


_FORGETTING = _Forgetting()


def computed(function: Any, *operands: Any) -> Any:
    """The result of an autograd function, or without gradients of its forward pass alone.

    An autograd function costs as much as a small matrix product.
    """
    if torch.is_grad_enabled():
        return function.apply(*operands)
    return function.forward(_FORGETTING, *operands)


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Operands of the backward pass of a forest's attention.

    Args:
        table: each segment's start, length, and end of its descendants: ``[3, segments]``.
        lse: the log-sum-exp of each row.
    """

    table: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    grad_out: Tensor
    lse: Tensor
    scale: float


class Functions(Protocol):
    """A set of compiled functions. Each predicate says whether one takes these tensors."""

    RmsNorm: type[torch.autograd.Function]
    """As ``lean_ops.rms_norm`` of ``[T, d]``."""
    Heads: type[torch.autograd.Function]
    """As ``lean_ops.heads``, with its tables and weights one by one."""
    Gated: type[torch.autograd.Function]
    """As ``lean_ops.gated`` with ``silu``."""

    def allow(self, compiled: bool) -> None:
        """Whether this process trains with these functions (``system.compile``)."""

    def fits(self, *tensors: Tensor) -> bool:
        """Whether a layer's operations take these tensors."""
        ...

    def multiplies_rows(self, x: Tensor, weight: Tensor) -> bool:
        """Whether ``product`` takes these operands."""
        ...

    def product(self, x: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
        """As ``product`` below, without a bias."""
        ...

    def multiplies_bfloat16(self, weight: Tensor) -> bool:
        """Whether ``bfloat16_product`` takes this weight."""
        ...

    def bfloat16_product(self, x: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
        """As ``product`` below of bfloat16, with a float32 result."""
        ...

    def multiplies(self, weight: Tensor) -> bool:
        """Whether ``add_product`` computes the gradient of this weight."""
        ...

    def add_product(self, grad: Tensor, x: Tensor, sums: Sequence[tuple[Tensor, bool]]) -> None:
        """Write ``grad.T @ x`` to float32 sums, or add it to them.

        Args:
            grad: ``[T, N]``.
            x: ``[T, d]``.
            sums: contiguous blocks of the product's rows, in order, and whether to add to each
                block or overwrite it.
        """

    def attends(self, query: Tensor) -> bool:
        """Whether ``attend`` takes these queries."""
        ...

    def attend(
        self, table: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """A forest's attention ``[T, H, D]``, and the log-sum-exp ``[H, T]``; ``table`` as in
        ``AttentionParts``. Where there are more keys than queries, the queries are the last rows'.
        """
        ...

    def attends_backward(self, query: Tensor) -> bool:
        """Whether ``attend_backward`` takes these queries."""
        ...

    def attend_backward(self, parts: AttentionParts) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        ...


FUNCTIONS = Door[Functions]("functions", "tunesmith.models.cpu.functions:FUNCTIONS")


def which(takes: Callable[[Functions], bool]) -> Functions | None:
    """The first registered functions that take an operation's tensors."""
    for functions in FUNCTIONS.rooms:
        if takes(functions):
            return functions
    return None


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, turned: bool = False
) -> Tensor:
    """``x @ weight.T + bias``, or ``x @ weight`` of a ``turned`` weight; without gradients."""
    functions = which(lambda functions: functions.multiplies_rows(x, weight))
    if functions is not None:
        out = functions.product(x, weight, turned=turned)
        return out if bias is None else out.add_(bias)
    return x @ weight if turned else F.linear(x, weight, bias)


def allow(compiled: bool) -> None:
    """Whether this process trains with compiled functions."""
    for functions in FUNCTIONS.rooms:
        functions.allow(compiled)
