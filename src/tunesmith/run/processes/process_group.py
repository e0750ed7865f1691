"""Process groups besides torch.distributed's own: made for one purpose, over a given store and
address."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from math import ceil
from threading import Lock
from typing import Any, Literal

import torch.distributed as dist

GroupKind = Literal["gloo", "nccl"]
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NOTHING = "0"
_INITIALISING = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_one_at_a_time = Lock()
REACHING = 20.0
"""Seconds to reach another process's store. It was there before its address was told; if it has
died, waiting is useless. PyTorch's store asks for the names of addresses, and a lost answer takes
5 s to ask again."""


def open_store(host: str, patience: float) -> dist.TCPStore:
    """A store where processes find each other, at a free port of the address ``host`` only, while
    it is referenced."""
    listening = socket.create_server((host, 0))
    port: int = listening.getsockname()[1]
    limit = timedelta(seconds=patience)
    fd = listening.detach()
    return dist.TCPStore(
        host, port, None, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=fd
    )


def process_group(
    kind: GroupKind,
    store: dist.Store,
    rank: int,
    world: int,
    host: str,
    patience: float,
    *,
    vital: bool = True,
) -> Any:
    """A process group that is not registered with torch.distributed.

    Args:
        host: an address of this machine, on which gloo listens for the others.
        patience: seconds that each operation may take, and that forming the group may take: with
            gloo here, with NCCL in the first operation. PyTorch reads the latter once per process.
        vital: if an NCCL operation fails, PyTorch ends the process; otherwise only the group is
            lost.
    """
    limit = timedelta(seconds=patience)
    prefixed = dist.PrefixStore("group", store)
    make: Callable[..., Any]
    if kind == "nccl":
        make = dist.ProcessGroupNCCL
        options: Any = make.Options()
        options._timeout = limit
        # Otherwise nothing ends the initialisation if a process is lost.
        options.config.blocking = 0
        os.environ.setdefault(_INITIALISING, str(ceil(patience)))
        with nullcontext() if vital else _errors_left_to_the_caller():
            return make(prefixed, rank, world, options)
    make = dist.ProcessGroupGloo
    options = make._Options()
    options._devices = [make.create_device(hostname=host, lazy_init=False)]
    options._threads = 1
    options._timeout = limit
    return make(prefixed, rank, world, options)


@contextmanager
def _errors_left_to_the_caller() -> Generator[None]:
    """NCCL groups made inside do not end the process when an operation fails; they read the
    variable only once."""
    with _one_at_a_time:
        before = os.environ.get(_ERRORS)
        os.environ[_ERRORS] = _NOTHING
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERRORS]
            else:
                os.environ[_ERRORS] = before
