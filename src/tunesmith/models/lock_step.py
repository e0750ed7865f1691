"""Keeps the ranks of a sharded model together when one of them runs out of memory."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from transformers import PreTrainedModel

from tunesmith.errors import DeviceMemoryError
from tunesmith.models.sharding import shards


class LockStep:
    """The passes of a sharded model.

    A pass makes the same collective operations in the same order on every rank, whatever its tokens. If a rank runs out
    of memory it makes the remaining ones with empty data, so that the others can finish theirs; ``settle`` then raises
    on all ranks. Kinds of passes tell apart those that make different operations.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.failure: str | None = None
        """Why a pass failed on this rank, since ``settle``."""
        self._root = cast(FSDPModule, module)
        self._known: dict[Hashable, list[Callable[[], object]]] = {}
        """How to repeat each collective operation of a kind of pass."""
        self._made: list[Callable[[], object]] = []
        self._failed_before = False
        for part in shards(module):
            part.set_custom_all_gather(_AllGather(self._made))
            part.set_custom_reduce_scatter(_ReduceScatter(self._made))

    def begin(self, kind: Hashable) -> bool:
        """Whether a pass of this kind must be learned first, by one that needs next to no memory."""
        self._made.clear()
        self._failed_before = self.failure is not None
        return kind not in self._known

    def learn(self, kind: Hashable) -> None:
        """The pass that ends now is whole.

        Raises:
            DeviceMemoryError: it failed.
        """
        if self.failure is not None and not self._failed_before:
            raise DeviceMemoryError(self.failure)
        self._known[kind] = [*self._made]
        self._made.clear()

    def finish(self, kind: Hashable) -> None:
        """Make what is left of a failed pass's operations."""
        if self.failure is not None:
            self._root.reset_iter_state()
            for repeat in self._known[kind][len(self._made) :]:
                repeat()

    def settle(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Raise ``DeviceMemoryError`` on all ranks if a pass failed on one since the last call.

        Args:
            total: sums a tensor over the ranks.
        """
        failure, self.failure = self.failure, None
        if total(torch.tensor([float(failure is not None)], device=device)).item():
            raise DeviceMemoryError(failure or "another rank of the trainer ran out of memory")


class _AllGather(DefaultAllGather):
    """Notes how to repeat each operation."""

    def __init__(self, made: list[Callable[[], object]]) -> None:
        self._made = made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather, output, given = super().__call__, _like(output_tensor), _like(input_tensor)
        self._made.append(lambda: gather(output(), given(), group))
        return gather(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """As ``_AllGather``."""

    def __init__(self, made: list[Callable[[], object]]) -> None:
        self._made = made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        reduce, output, given = super().__call__, _like(output_tensor), _like(input_tensor)
        self._made.append(lambda: reduce(output(), given(), group, op))
        return reduce(output_tensor, input_tensor, group, op, async_op)


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes a tensor of zeros like this one."""
    return partial(torch.zeros, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
