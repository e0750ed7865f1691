"""Process groups of one process alone: operations give tensors of the right shapes, and nobody answers."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore  # the import makes the backend known

from tunesmith.fake_device.threads import gpu_of_thread


@contextmanager
def fake_groups() -> Generator[None]:
    """Inside, whoever joins others is alone: torch.distributed's default group, and groups between GPUs.

    Processes of one run have a default group each, but all of the same size: here it is one.
    """
    initialise, joined = dist.init_process_group, set[str]()

    def join(*_: Any, rank: int, world_size: int, **__: Any) -> None:
        if not joined:
            initialise("fake", store=FakeStore(), rank=rank, world_size=world_size)
        joined.add(gpu_of_thread())

    def is_initialized() -> bool:
        return gpu_of_thread() in joined

    with (
        patch.multiple(dist, init_process_group=join, is_initialized=is_initialized),
        patch.object(dist, "ProcessGroupNCCL", _Nccl, create=True),  # which a torch without CUDA lacks
    ):
        try:
            yield
        finally:
            if joined:
                dist.destroy_process_group()


class _Nccl:
    Options = SimpleNamespace

    def __new__(cls, store: Any, rank: int, world: int, options: Any) -> Any:
        del store, options
        return FakeProcessGroup._create_internal(rank, world)  # pyright: ignore[reportPrivateUsage]
