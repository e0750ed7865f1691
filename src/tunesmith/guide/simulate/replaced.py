"""The parts of torch that a fake device replaces: those that need a GPU before any operation is
dispatched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from tunesmith.guide.simulate.groups import fake_groups
from tunesmith.guide.simulate.memory import MemoryUse
from tunesmith.guide.simulate.replacing import replacing
from tunesmith.guide.simulate.sharded import shards_named
from tunesmith.guide.simulate.threads import starts_here
from tunesmith.models.kernels import attention
from tunesmith.models.parallel.experts import ExpertGroup, Journey

META = torch.device("meta")
GROUPED = "_group_tensors_by_device_and_dtype"
_group = getattr(clip_grad, GROUPED)
_DATA: Any = vars(torch._C.TensorBase)["data"]  # pyright: ignore[reportPrivateUsage]
READ: dict[str, Any] = {"item": 0, "__float__": 0.0, "__int__": 0, "__index__": 0, "__bool__": True}
"""Methods that read a value, and the values they return."""


class Device(Protocol):
    """The device that receives the events."""

    memories: defaultdict[str, MemoryUse]
    gpus: int
    together: int
    capability: tuple[int, int]

    @property
    def memory(self) -> MemoryUse: ...

    def wait(self, operation: str) -> None: ...

    def numbers(self, tensor: Tensor) -> Tensor: ...

    def on_this_thread(self) -> AbstractContextManager[None]: ...

    def allocating(self, purpose: str) -> AbstractContextManager[None]: ...


class Stream:
    """Serves as an event, too: there are no values to wait for, so the order of operations does not
    matter.

    A tensor that a stream uses keeps its memory until the host has waited for a later event.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.used = list[Tensor]()

    def synchronize(self) -> None:
        self._device.wait("synchronize")
        self.used.clear()

    def record(self, stream: Stream | None = None) -> None:
        if stream is not None:
            self.used = stream.used
            stream.used = []

    def record_event(self, event: Stream | None = None) -> Stream:
        return event or self

    def wait_for(self, *_: object) -> None: ...

    wait_stream = wait_event = wait = wait_for


@contextmanager
def replaced(device: Device) -> Generator[None]:
    """Replace methods of fake tensors and functions of ``torch.cuda``; new threads use the device,
    too."""
    resize = torch.UntypedStorage.resize_
    run = Thread.run
    start = Thread.start

    def reader(name: str) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            if tensor.is_cuda:
                device.wait(name)
            return True if tensor.dtype == torch.bool else READ[name]

        return read

    def tolist(tensor: Tensor) -> Any:
        device.wait("tolist")
        return device.numbers(tensor).tolist()

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        for memory in [*device.memories.values()]:
            memory.resized(storage)

    def even_journey(_: object, sent: Tensor, __: Tensor, rows: int) -> Journey:
        device.wait("tolist")
        ranks = len(sent)
        counts = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return Journey(counts, counts)

    def start_on(thread: Thread) -> None:
        starts_here(thread)
        start(thread)

    def run_inside(thread: Thread) -> None:
        with device.on_this_thread():
            run(thread)

    def kind(name: str) -> property:
        return property(lambda tensor: tensor.device.type == name)

    methods: dict[str, Any] = {name: reader(name) for name in READ}
    methods |= {"tolist": tolist, "to": _to, "numpy": _always(b"")}
    methods |= {"record_stream": _use, "is_pinned": _is_in_host_memory}
    methods["data"] = property(_DATA.__get__, _set_data)
    kinds = {f"is_{name}": kind(name) for name in ("cuda", "cpu", "meta")}
    of_rows = {"to": _to, "device": property(lambda tensor: tensor._local_tensor.device)}
    with ExitStack() as stack:
        for owner, attributes in ((FakeTensor, methods | kinds), (DTensor, of_rows | kinds)):
            stack.enter_context(replacing(owner, **attributes))
        stack.enter_context(replacing(ExpertGroup, journey=even_journey))
        # A module that changes its parameters' dtype swaps them, unless one has a weak reference.
        stack.enter_context(replacing(torch.utils, weakref=_NoWeakReferences))
        stack.enter_context(replacing(Thread, run=run_inside, start=start_on))
        # The number is for another machine.
        stack.enter_context(replacing(torch, set_num_threads=_always(None)))
        stack.enter_context(replacing(torch.UntypedStorage, resize_=resized))
        stack.enter_context(replacing(torch.cuda, **_cuda(device)))
        stack.enter_context(replacing(clip_grad, **{GROUPED: _grouped}))
        stack.enter_context(replacing(attention, is_ampere=_always(device.capability >= (8, 0))))
        stack.enter_context(fake_groups(device.together))
        stack.enter_context(shards_named(device.allocating))
        yield


def _set_data(tensor: Any, data: Any) -> None:
    """A parameter whose values move is then on their device."""
    _DATA.__set__(tensor, data)
    tensor.fake_device = data.fake_device


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Pass ``cuda`` as the meta device, where C++ believes the tensor is; otherwise it would copy
    it needlessly.

    A tensor in host memory that moves to the device is copied here, because C++ would not copy it.
    """
    args = tuple(map(_as_told, args))
    kwargs = {key: _as_told(value) for key, value in kwargs.items()}
    every = [*args, *kwargs.values()]
    if tensor.device.type == "cpu" and any(each is META for each in every):
        dtype = next((each for each in every if isinstance(each, torch.dtype)), tensor.dtype)
        copied = {"dtype": dtype, "non_blocking": kwargs.get("non_blocking", False)}
        return torch.ops.aten._to_copy.default(tensor, device=META, **copied)
    return Tensor.to(tensor, *args, **kwargs)


def _grouped(tensors: object, with_indices: bool = False) -> Any:
    """Restore the tensors' device: C++ believes they are on meta, and clipping would move its
    coefficient there."""
    groups = _group(tensors, with_indices).items()
    return {(lists[0][0].device, kind): (lists, more) for (_, kind), (lists, more) in groups}


def _as_told(argument: object) -> Any:
    names_cuda = isinstance(argument, str | torch.device) and str(argument).startswith("cuda")
    return META if names_cuda else argument


class _NoWeakReferences:
    """Instead of the module ``weakref``."""

    @staticmethod
    def getweakrefs(_: object) -> tuple[()]:
        return ()


def _always(value: object) -> Callable[..., Any]:
    """A function with this result for all arguments."""

    def answer(*_: object, **__: object) -> Any:
        return value

    return answer


def _is_in_host_memory(tensor: Tensor) -> bool:
    """Whether a tensor is pinned: the simulation keeps no numbers of pinned tensors."""
    return tensor.is_cpu


def _use(tensor: Tensor, stream: Stream) -> None:
    stream.used.append(tensor)


def _cuda(device: Device) -> dict[str, Any]:
    """Replacements for functions of ``torch.cuda``."""
    stream = Stream(device)

    def another(*_: object, **__: object) -> Stream:
        return Stream(device)

    def synchronize(_: object = None) -> None:
        stream.synchronize()

    return {
        "get_rng_state": _always(torch.zeros(16, dtype=torch.uint8)),
        "current_device": _always(0),
        "device_count": lambda: device.gpus,
        "get_device_capability": _always(device.capability),
        "synchronize": synchronize,
        "stream": nullcontext,
        "current_stream": _always(stream),
        **dict.fromkeys(("Stream", "Event"), another),
        "empty_cache": lambda: device.memory.empty_cache(),
        **dict.fromkeys(("init", "set_device", "set_rng_state"), _always(None)),
    }
