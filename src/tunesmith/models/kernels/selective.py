"""Selective checkpointing: of a lean layer's pass, products and attention are kept for the backward
pass, and what is computed between them (norms, rotations, gates, casts) is computed again.

Autograd saves the operands of products and of attention. Where such an operand comes out of one of
these operations, its call is saved instead: the function and its own operands, most of which are
kept anyway. The backward pass calls the function again with the same operands, so gradients are
equal bit by bit. What is kept goes through the hooks around the pass (``parallel.activations``).
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tunesmith.models.kernels.lean_ops import Operations

R = TypeVar("R")


@dataclass(slots=True)
class _Call:
    """A call that the backward pass repeats."""

    work: Callable[..., object]
    operands: object
    """As they were packed."""
    uses: int = 0
    """The number of saved tensors that are results of the call."""
    results: list[Tensor] = field(default_factory=list[Tensor])
    """The results, while some of these have yet to be read."""
    reads: int = 0


@dataclass(frozen=True, slots=True)
class _Result:
    """A saved tensor that is a result of a call, or a view of one."""

    call: _Call
    place: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """An operand that was packed by the hooks around the pass."""

    packed: object


class _Pass:
    """The calls of one layer's forward pass."""

    def __init__(self) -> None:
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
        pack, unpack = hooks or (_same, _same)
        self._pack: Callable[..., object] = pack
        self._unpack: Callable[..., Tensor] = unpack
        self._made = WeakKeyDictionary[torch.UntypedStorage, tuple[_Call, int]]()
        """The call that made a storage, and its place among the call's results."""

    def again(self, work: Callable[..., R], *operands: object) -> R:
        results = work(*operands)
        kept = {t.untyped_storage() for t in tree_leaves(operands) if isinstance(t, Tensor)}
        call = _Call(work, tree_map_only(Tensor, self._kept, operands))
        for place, result in enumerate(tree_leaves(results)):
            if result.untyped_storage() not in kept:
                self._made[result.untyped_storage()] = call, place
        return results

    def pack(self, tensor: Tensor) -> object:
        made = self._made.get(tensor.untyped_storage())
        if made is None:
            return self._pack(tensor)
        call, place = made
        call.uses += 1
        return _Result(call, place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: object) -> Tensor:
        if not isinstance(saved, _Result):
            return self._unpack(saved)
        call = saved.call
        if not call.results:
            with torch.no_grad():
                operands = tree_map_only(
                    _Kept, lambda kept: self.unpack(kept.packed), call.operands
                )
                call.results = tree_leaves(call.work(*operands))
        result = call.results[saved.place].as_strided(saved.shape, saved.stride, saved.offset)
        call.reads = (call.reads + 1) % call.uses
        if not call.reads:
            call.results = []
        return result

    def _kept(self, operand: Tensor) -> object:
        """What a call holds of an operand."""
        return operand if isinstance(operand, nn.Parameter) else _Kept(self.pack(operand.detach()))


_CURRENT = ContextVar[_Pass | None]("selective_pass", default=None)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def keeping_products() -> Generator[None]:
    """A context for a layer's forward pass in which results of ``again`` are not saved for the
    backward pass."""
    current = _Pass()
    token = _CURRENT.set(current)
    try:
        with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
            yield
    finally:
        _CURRENT.reset(token)


def again(work: Callable[..., R], *operands: object) -> R:
    """``work(*operands)``, which the backward pass computes again if products alone are kept."""
    current = _CURRENT.get()
    return work(*operands) if current is None else current.again(work, *operands)


def cast_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of a module in the dtype of its adapter's weights."""
    return x if x.dtype == dtype else again(Tensor.to, x, dtype)


def recomputed(operations: Operations) -> Operations:
    """A layer's operations, whose results the backward pass computes again."""
    return Operations(
        rms_norm=partial(again, operations.rms_norm),
        heads=partial(again, operations.heads),
        gated=partial(again, operations.gated),
    )
