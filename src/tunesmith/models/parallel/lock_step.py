"""Keeps ranks that share a model or micro-batches together when one of them runs out of memory."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from transformers import PreTrainedModel

from tunesmith.errors import ConfigError, DeviceMemoryError
from tunesmith.models.parallel.experts import ExpertGroup
from tunesmith.models.parallel.sequence import SequenceGroup
from tunesmith.models.parallel.sharding import shards

Replay = Callable[[], object]
Waiting = Callable[[], AbstractContextManager[None]]
W = TypeVar("W")

_MICRO_BATCH = "system.max_tokens_per_microbatch"
_NO_RECOVERY = (
    "a trainer rank ran out of memory, and before torch 2.13 a sharded model cannot run another "
    f"pass after that (this is torch {torch.__version__}); set a smaller {_MICRO_BATCH}, or "
    "install torch 2.13, which tries again with smaller micro-batches"
)


class LockStep:
    """The passes of a model that is sharded or in a sequence group.

    A pass issues the same collective operations in the same order on every rank, regardless of its
    tokens. If a rank runs out of memory, it issues the remaining ones with zeros, so that the
    others can finish theirs; ``settle`` then raises on all ranks. Passes of different kinds issue
    different operations.

    FSDP2 has nothing for this. A flag that all ranks sum before a pass comes too early: memory runs
    out within it, while the others already wait in a gather. A flag with each gather would stop the
    device once per layer. A pass over an empty micro-batch instead of the replay would run FSDP's
    state of a half-finished pass, with prefetched gathers and hooks of a graph that is gone,
    through the rest of its order. What remains are the two collectives, which FSDP2 lets us set,
    and one private access (``forget_unsharded_gradients``), as it keeps gradients that are not
    summed.

    Args:
        waiting: the context in which a rank waits for the others.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        waiting: Waiting,
        sequence: SequenceGroup | None = None,
        experts: ExpertGroup | None = None,
    ) -> None:
        self.failure: str | None = None
        """Why a pass failed on this rank since the last ``settle``."""
        self._module = module
        self._sequence = sequence
        self._experts = experts
        self._waiting = waiting
        self._recorded: dict[Hashable, list[Replay]] = {}
        """Functions that reissue each collective operation, by kind of pass."""
        self._issued: list[Replay] = []
        self._failed_before: str | None = None
        """``failure`` before the pass that is being recorded."""
        recorder = _Recorder(self._issued, waiting)
        for part in shards(module):
            part.set_custom_all_gather(_AllGather(recorder))
            part.set_custom_reduce_scatter(_ReduceScatter(recorder))

    @property
    def _recovers(self) -> bool:
        """Whether a pass that failed can be followed by another."""
        module = self._module
        return not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")

    def begin(self, kind: Hashable) -> bool:
        """Whether a pass of this kind has yet to be recorded; the caller then runs one that needs
        almost no memory."""
        self._issued.clear()
        if self._sequence is not None:
            self._sequence.issued = self._issued
            self._sequence.waiting = self._waiting
        self._begin_experts()
        if kind in self._recorded:
            return False
        self._failed_before = self.failure
        self.failure = None
        return True

    def record(self, kind: Hashable) -> None:
        """Record the pass that has just ended as complete.

        Raises:
            DeviceMemoryError: the pass failed.
        """
        failure = self.failure
        self.failure = self._failed_before
        if failure is not None:
            self.failure = None
            raise DeviceMemoryError(failure)
        self._recorded[kind] = [*self._issued]
        self._issued.clear()
        self._begin_experts()

    def _begin_experts(self) -> None:
        if self._experts is not None:
            self._experts.begin(self._issued, self._waiting)

    def finish(self, kind: Hashable) -> None:
        """Issue the remaining operations of a failed pass."""
        if self.failure is None:
            return
        if isinstance(self._module, FSDPModule) and self._recovers:
            self._module.reset_iter_state()
            forget_unsharded_gradients(self._module)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        for replay in self._recorded[kind][len(self._issued) :]:
            replay()

    def settle(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Raise ``DeviceMemoryError`` on all ranks if a pass failed on one since the last call.

        Args:
            total: sums a tensor over the ranks.

        Raises:
            ConfigError: and torch cannot run a sharded model any more after that.
        """
        failure = self.failure
        self.failure = None
        if total(torch.tensor([float(failure is not None)], device=device)).item():
            if not self._recovers:
                raise ConfigError(_NO_RECOVERY, keys=(_MICRO_BATCH,))
            forget_unsharded_gradients(self._module)
            raise DeviceMemoryError(failure or "another rank ran out of memory")


def forget_unsharded_gradients(module: PreTrainedModel) -> None:
    """Drop gradients that are not yet summed; ``reset_iter_state`` keeps them."""
    for part in shards(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Runs collective operations, and records how to reissue each."""

    issued: list[Replay]
    waiting: Waiting

    def run(self, collective: Callable[..., W], output: Tensor, given: Tensor, async_op: bool) -> W:
        def issue(output: Tensor, given: Tensor, async_op: bool = False) -> W:
            with self.waiting():
                return collective(output, given, async_op=async_op)

        zero_output = _like(output)
        zeros = _like(given)
        self.issued.append(lambda: issue(zero_output(), zeros()))
        return issue(output, given, async_op)


class _AllGather(DefaultAllGather):
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        gather = partial(super().__call__, group=group)
        return self._recorder.run(gather, output_tensor, input_tensor, async_op)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        reduce = partial(super().__call__, group=group, op=op)
        return self._recorder.run(reduce, output_tensor, input_tensor, async_op)


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    """A function that makes a flat tensor of zeros with the size, dtype and device of this one."""
    return partial(torch.zeros, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
