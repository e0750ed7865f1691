"""Memory that other processes on the same device map: a GPU's (CUDA IPC), or the machine's."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tunesmith.errors import EngineError, StorageError, boundary
from tunesmith.run.weights.directories import shared_directory

Handle = Any
"""Plain values by which another process finds the memory."""


class MappedMemory(Protocol):
    """Both sides: ``allocated`` and ``share`` are the owner's, ``opened`` is the reader's."""

    def places(self) -> list[str]:
        """The devices whose memory this process can map, by names that all processes use; the one
        on which it computes comes first."""
        ...

    def allocated(self, size: int) -> Any:
        """A context with a uint8 tensor of ``size`` that can be shared."""
        ...

    def clean(self) -> None:
        """Give memory that is free again to the device's other processes."""

    def share(self, buffer: Tensor) -> Handle:
        """A handle for one reader."""
        ...

    def opened(self, handle: Handle, size: int, place: str) -> Tensor:
        """The shared tensor, which is on the device ``place``.

        Raises:
            EngineError: it cannot be mapped.
        """
        ...


class HostMemory:
    """This machine's memory, through a file in ``/dev/shm``."""

    def __init__(self) -> None:
        self._path = Path()

    def places(self) -> list[str]:
        return [socket.gethostname()]

    @contextmanager
    def allocated(self, size: int) -> Generator[Tensor]:
        with shared_directory(size) as directory:
            path = Path(directory) / "bucket"
            with boundary(StorageError, f"no room for {size} bytes at {path}", OSError):
                _reserve(path, size)
            self._path = path
            yield _map(path, size)

    def clean(self) -> None:
        """Nothing to do: the file is gone."""

    def share(self, buffer: Tensor) -> Handle:
        del buffer
        return str(self._path)

    def opened(self, handle: Handle, size: int, place: str) -> Tensor:
        del place
        with boundary(EngineError, f"cannot map the trainer's bucket {handle}", RuntimeError):
            return _map(Path(handle), size)


class CudaMemory:
    """Memory of a GPU that several processes see.

    Args:
        device: the GPU on which this process computes; ``cuda``: the current one.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._device = torch.device(device)

    def places(self) -> list[str]:
        with torch.cuda.device(self._device):
            own = torch.cuda.current_device()
        others = (number for number in range(torch.cuda.device_count()) if number != own)
        return [_uuid(number) for number in (own, *others)]

    @contextmanager
    def allocated(self, size: int) -> Generator[Tensor]:
        with _plain_segments():
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        yield buffer

    def clean(self) -> None:
        torch.cuda.ipc_collect()  # what readers have let go
        torch.cuda.empty_cache()

    def share(self, buffer: Tensor) -> Handle:
        # Each reader has its own: the memory counts as in use until that handle is dropped.
        storage: Any = buffer.untyped_storage()
        parts = storage._share_cuda_()
        return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts]

    def opened(self, handle: Handle, size: int, place: str) -> Tensor:
        parts = [bytes.fromhex(p["hex"]) if isinstance(p, dict) else p for p in handle]
        numbers = range(torch.cuda.device_count())
        device = next(number for number in numbers if _uuid(number) == place)
        with boundary(EngineError, "cannot map the trainer's bucket by CUDA IPC", RuntimeError):
            torch.cuda.init()
            storage: Any = torch.UntypedStorage._new_shared_cuda(device, *parts[1:])
            return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:size]


def mapped_memory(device: str) -> MappedMemory:
    """The memory of a device, such as ``cuda:1`` or ``cpu``."""
    return CudaMemory(device) if torch.device(device).type == "cuda" else HostMemory()


@contextmanager
def _plain_segments() -> Generator[None]:
    """What is allocated inside does not lie in expandable segments, whose handles only processes
    that may trace each other can open (``pidfd_getfd``)."""
    settings = _allocator_settings()
    plain = settings.replace("expandable_segments:True", "expandable_segments:False")
    if plain == settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(plain)  # what it does not name is reset
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    """What the allocator was told; before torch 2.13, which can say it, in the environment."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


def _reserve(path: Path, size: int) -> None:
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):  # a process that writes where there is no room is killed
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def _map(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
