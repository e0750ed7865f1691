"""What a fake device replaces in torch: what asks for a GPU before any operation is dispatched."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tunesmith.fake_device.memory import MemoryUse

META = torch.device("meta")
READ: dict[str, Any] = {"item": 0, "__float__": 0.0, "__int__": 0, "__index__": 0, "__bool__": True}
"""Methods that read a number, and what they read."""


class Device(Protocol):
    """What is told of what happens."""

    memory: MemoryUse

    def wait(self, operation: str) -> None: ...

    def on_this_thread(self) -> AbstractContextManager[None]: ...


@contextmanager
def replaced(device: Device) -> Generator[None]:
    """Replace methods of fake tensors and functions of ``torch.cuda``; threads that start use the device too."""
    resize, run = torch.UntypedStorage.resize_, Thread.run

    def reader(name: str) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            device.wait(name)
            return True if tensor.dtype == torch.bool else READ[name]

        return read

    def tolist(tensor: Tensor) -> Any:
        device.wait("tolist")
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """C++ takes the tensor to be on the meta device, and would copy it to the one on which it is."""
        return Tensor.to(tensor, *map(_as_told, args), **{key: _as_told(value) for key, value in kwargs.items()})

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        device.memory.resized(storage)

    def run_inside(thread: Thread) -> None:
        with device.on_this_thread():
            run(thread)

    def kind(name: str) -> property:
        return property(lambda tensor: tensor.device.type == name)

    methods: dict[str, Any] = {name: reader(name) for name in READ} | {"tolist": tolist, "to": to}
    methods |= {f"is_{name}": kind(name) for name in ("cuda", "cpu", "meta")}
    with ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(patch.object(FakeTensor, name, method, create=True))
        # A module whose parameters change their type swaps them, unless anything has a weak reference to one.
        stack.enter_context(patch.object(torch.utils, "weakref", SimpleNamespace(getweakrefs=_no_references)))
        stack.enter_context(patch.object(Thread, "run", run_inside))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(patch.multiple(torch.cuda, **_CUDA))
        yield


def _as_told(argument: Any) -> Any:
    names_cuda = isinstance(argument, str | torch.device) and str(argument).startswith("cuda")
    return META if names_cuda else argument


def _no_references(_: object) -> tuple[()]:
    return ()


def _nothing(*_: Any, **__: Any) -> None: ...


def _random_state(*_: Any) -> Tensor:
    return torch.zeros(16, dtype=torch.uint8)


class _Stream:
    """Of a device that computes nothing, and so in any order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = _nothing


def _stream(*_: Any) -> _Stream:
    return _Stream()


_CUDA: dict[str, Any] = {
    "get_rng_state": _random_state,
    "Stream": _Stream,
    "current_stream": _stream,
    "stream": nullcontext,
    **dict.fromkeys(("set_rng_state", "empty_cache", "synchronize"), _nothing),
}
