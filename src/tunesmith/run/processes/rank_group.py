"""The processes that train one model together, and their sums."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tunesmith.errors import ModelError, TrainerLostError, TunesmithError, boundary
from tunesmith.models.parallel import PATIENCE
from tunesmith.run.processes.checksum import checksum
from tunesmith.run.processes.process_group import REACHING, process_group

BUCKET = 64 << 20
"""Bytes summed at a time; a larger gradient is summed by itself."""


def reach_store(host: str, port: int) -> dist.TCPStore:
    """Connect to another process's store."""
    limit = timedelta(seconds=REACHING)
    unreached = f"no rank of the trainer is reached at {host}:{port}"
    with boundary(TrainerLostError, unreached, RuntimeError):
        store = dist.TCPStore(host, port, None, is_master=False, timeout=limit)
    store.set_timeout(timedelta(seconds=PATIENCE))
    return store


def join_default_group(store: dist.TCPStore, rank: int, world: int, host: str, device: str) -> None:
    """Make torch.distributed's default group, which sharded models use. A process has only one.

    Args:
        host: this machine's address; gloo listens only on its interface.
    """
    if dist.is_initialized():
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == host for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    _make_default_group(dist.PrefixStore("default", store), rank, world, device)


def join_group_of_one(device: str) -> None:
    """Make torch.distributed's default group for a process that trains by itself."""
    _make_default_group(dist.HashStore(), 0, 1, device)


def _make_default_group(store: dist.Store, rank: int, world: int, device: str) -> None:
    kind = "gloo"
    if device.startswith("cuda"):
        kind = "cpu:gloo,cuda:nccl"
        torch.cuda.init()
        # Otherwise a mesh uses that of LOCAL_RANK.
        torch.cuda.set_device(torch.device(device).index or 0)
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group(kind, store=store, rank=rank, world_size=world, timeout=limit)


class RankGroup:
    """Rank ``rank`` of ``world``. All ranks make the same calls in the same order.

    Gloo between CPUs, NCCL between GPUs. A sum is bitwise equal on every rank.

    Args:
        host: this machine's address, as the others reach it.
        patience: see ``PATIENCE``.

    Raises:
        TrainerLostError: from every method, when another rank is gone or does not answer.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        world: int,
        host: str,
        device: torch.device | str = "cpu",
        patience: float = PATIENCE,
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = torch.device(device)
        self.patience = patience
        self._store = store  # kept: NCCL's ranks connect at their first sum
        kind = "nccl" if self.device.type == "cuda" else "gloo"
        with self._lost("did not find"):
            self._group: Any = process_group(kind, store, rank, world, host, patience)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter], over: Any = None) -> None:
        """Sum each parameter's gradient over the ranks; one that no rank has stays None.

        Sums are in the gradient's own dtype. A rank without a micro-batch contributes zeros.

        Args:
            over: as for ``sum``.
        """
        every = list(parameters)
        there = torch.tensor([float(p.grad is not None) for p in every], device=self.device)
        self.sum(there, over)
        for bucket in buckets([p for p, n in zip(every, there.tolist(), strict=True) if n]):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([g.flatten() for g in grads]) if grads[1:] else grads[0].flatten()
            flat = self.sum(flat.to(self.device), over)
            pieces = flat.split([p.numel() for p in bucket])
            for parameter, grad, piece in zip(bucket, grads, pieces, strict=True):
                summed = piece.view_as(parameter)
                # One in host memory stays where it is: the first touch of a page costs several
                # times a later one.
                parameter.grad = summed if summed.device == parameter.device else grad.copy_(summed)

    def check_equal(self, tensors: Iterable[Tensor], over: Any = None) -> None:
        """Compare tensors between ranks.

        Args:
            over: as for ``sum``.

        Raises:
            ModelError: the tensors differ between ranks.
        """
        digest = 0
        for tensor in tensors:
            digest = zlib.crc32((checksum(tensor) % 2**64).to_bytes(8, "little"), digest)
        total = torch.tensor([digest, 1], device=self.device)
        self.sum(total, over)
        if int(total[0]) != int(total[1]) * digest:
            raise ModelError(
                "the ranks of a trainer have different weights: the model has to be the same on "
                "every machine"
            )

    def sum(self, tensor: Tensor, over: Any = None) -> Tensor:
        """The sum over the ranks, in place.

        Args:
            over: a process group of some ranks, including this one; None: all.
        """
        with self.waiting():
            (over or self._group).allreduce([tensor]).wait()
        return tensor

    def begin_sum(self, tensor: Tensor) -> Any:
        """Begin the sum over all ranks, in place; it is done after ``wait`` of the result."""
        with self.waiting():
            return self._group.allreduce([tensor])

    def waiting(self) -> AbstractContextManager[None]:
        """The context in which ranks wait for each other."""
        return self._lost("waited for")

    @contextmanager
    def _lost(self, what: str) -> Generator[None]:
        who = f"rank {self.rank} of the trainer's {self.world}"
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TunesmithError | torch.OutOfMemoryError):
                raise  # memory is short here; no rank is lost
            gone = "which is gone or did not answer"
            raise TrainerLostError(
                f"{who} {what} another one, {gone} for {self.patience:g} s: {error}"
            ) from error


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype whose gradients total at most ``BUCKET`` bytes, or a single larger
    one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size + parameter.nbytes > BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
