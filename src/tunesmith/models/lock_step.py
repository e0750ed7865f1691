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
    """Runs the passes of a sharded model.

    A pass makes the same collective operations in the same order on every rank, whatever its tokens. If a rank runs out
    of memory it makes the remaining ones with empty data, so that the others can finish theirs; ``settle`` then raises
    on all ranks.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._root = cast(FSDPModule, module)
        self._known: dict[Hashable, list[Callable[[], object]]] = {}
        """How to repeat each collective operation of a kind of pass."""
        self._made: list[Callable[[], object]] = []
        self._failure: str | None = None
        for part in shards(module):
            part.set_custom_all_gather(_AllGather(self._made))
            part.set_custom_reduce_scatter(_ReduceScatter(self._made))

    def run(self, kind: Hashable, work: Callable[[], object], rehearse: Callable[[], object]) -> None:
        """Run a pass.

        Args:
            kind: passes of one kind make the same collective operations.
            rehearse: a pass of this kind that needs next to no memory; it runs before the first one.
        """
        if kind not in self._known:
            self._made.clear()
            rehearse()
            self._known[kind] = [*self._made]
        self._made.clear()
        if self._failure is None:
            try:
                work()
                return
            except DeviceMemoryError as error:
                self._failure = str(error)
        # Outside the handler, whose traceback keeps the failed pass's activations alive.
        self._root.reset_iter_state()
        for repeat in self._known[kind][len(self._made) :]:
            repeat()

    def settle(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Raise ``DeviceMemoryError`` on all ranks if a pass failed on one since the last call.

        Args:
            total: sums a tensor over the ranks.
        """
        failure, self._failure = self._failure, None
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
