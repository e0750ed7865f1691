"""Process groups of a single process: operations return tensors of the right shapes, without
communication."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend

from tunesmith.guide.simulate.replacing import replacing
from tunesmith.guide.simulate.threads import occupant_of_thread


@contextmanager
def fake_groups(most: int) -> Generator[None]:
    """Inside, groups have no other members: torch.distributed's default group, and groups between
    GPUs.

    The processes of a run have default groups of several sizes; here they are one group, of size
    ``most``.
    """
    initialise = dist.init_process_group
    size_of = dist.get_world_size
    joined = dict[str, int]()

    def join(*_: object, rank: int, world_size: int, **__: object) -> None:
        if not joined:
            initialise("fake", store=FakeStore(), rank=rank, world_size=max(most, world_size))
        joined[occupant_of_thread().gpu] = world_size

    def is_initialized() -> bool:
        return occupant_of_thread().gpu in joined

    def world_size(group: Any = None) -> int:
        return joined[occupant_of_thread().gpu] if group is None else size_of(group)

    with replacing(
        dist,
        init_process_group=join,
        is_initialized=is_initialized,
        get_world_size=world_size,
        ProcessGroupNCCL=_Nccl,  # which a torch without CUDA lacks
    ):
        try:
            yield
        finally:
            if joined:
                dist.destroy_process_group()


class _Nccl:
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __new__(cls, store: object, rank: int, world: int, options: object) -> Any:
        del store, options
        return FakeProcessGroup._create_internal(rank, world)  # pyright: ignore[reportPrivateUsage]
