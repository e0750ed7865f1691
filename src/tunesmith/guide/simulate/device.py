"""A simulated GPU: CUDA tensors with shapes, dtypes and storages, but without values.

Operations on the CPU compute as usual. Operations on CUDA tensors only return tensors of the right
shape and dtype: one that does not exist for the device, or mixes devices, raises as on a real GPU.
Where the host would wait for the device, to read a value or to copy, the wait is recorded, and
zeros (or True) are read.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunesmith.guide.simulate.memory import MemoryUse
from tunesmith.guide.simulate.replaced import replaced
from tunesmith.guide.simulate.sharded import SHAPES_ALONE
from tunesmith.guide.simulate.threads import occupant_of_thread

SIMULATE = Path(__file__).parent
PACKAGE = SIMULATE.parents[1]
HELD = ("weights", "gradients", "optimizer", "frozen models")
"""Purposes of tensors that are copied to host memory to be kept, not read."""
MOST_KEPT = 2**16
"""The most elements of a tensor written by the host whose values are kept for it to read."""
_WRITTEN = "_written_by_the_host"
CUDA = torch.device("cuda", 0)
META = torch.device("meta")
aten = torch.ops.aten


class FakeDevice(TorchDispatchMode):
    """Inside, ``device="cuda"`` works without a GPU, and memory and waits are counted.

    Args:
        gpus: number of this machine's GPUs; one of them is used.
        together: largest number of processes that share a model.
        capability: the compute capability of each GPU.
    """

    def __init__(
        self, gpus: int = 1, together: int = 1, capability: tuple[int, int] = (9, 0)
    ) -> None:
        super().__init__()
        self.gpus = gpus
        self.together = together
        self.capability = capability
        self.memories = defaultdict[str, MemoryUse](MemoryUse)
        """The memory of each GPU that the run's processes use, by name."""
        self.waits: Counter[str] = Counter()
        """Places at which the host waits for the device, as ``file:line operation``, and how
        often."""
        self.purpose: str | None = None
        """The purpose of new tensors; None: it depends on whether a backward pass runs."""
        self._fakes = _Fakes(allow_non_fake_inputs=True)
        self._stack = ExitStack()
        self._one_at_a_time = RLock()  # torch's mode is not thread-safe

    def __enter__(self) -> Self:
        self._stack.enter_context(warnings.catch_warnings())
        # Addresses are compared, never read.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        self._stack.enter_context(replaced(self))
        self._stack.enter_context(self._fakes)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._stack.close()

    @property
    def memory(self) -> MemoryUse:
        """The memory of the GPU that this thread uses."""
        return self.memories[occupant_of_thread().gpu]

    def _holding(self, tensor: Tensor) -> MemoryUse:
        """The memory of the GPU that has a tensor's storage, or else of this thread's."""
        own = self.memory
        return next((memory for memory in [*self.memories.values()] if memory.purpose(tensor)), own)

    def assign(self, purpose: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the purpose of these tensors, on any GPU."""
        tensors = [*tensors]
        for memory in [*self.memories.values()]:  # more may be added meanwhile
            memory.assign(purpose, tensors)

    @contextmanager
    def on_this_thread(self) -> Generator[None]:
        """Inside, another thread uses the device."""
        with self._fakes, self._again():
            yield

    @contextmanager
    def _again(self) -> Generator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    @contextmanager
    def allocating(self, purpose: str) -> Generator[None]:
        """Tensors allocated inside have this ``purpose``."""
        before = self.purpose
        self.purpose = purpose
        try:
            yield
        finally:
            self.purpose = before

    def wait(self, operation: str) -> None:
        """Record that the host waits, at the innermost stack frame in the product."""
        frame = sys._getframe(1)
        place = Path(frame.f_code.co_filename)
        while frame.f_back and (not place.is_relative_to(PACKAGE) or place.parent == SIMULATE):
            frame = frame.f_back
            place = Path(frame.f_code.co_filename)
        self.waits[f"{place.parent.name}/{place.name}:{frame.f_lineno} {operation}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return META
        with self._one_at_a_time:
            return self._result(func, args, dict(kwargs or {}))

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, DTensor | AsyncCollectiveTensor) for t in inputs):
            return NotImplemented  # they dispatch the operation to the tensors in them
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return inputs[0]  # a fake result would be another tensor
        place = str(kwargs.get("device") or "cpu")
        real = place == "cpu" or (place == "meta" and func is aten._to_copy.default)
        # Pinned memory is as large as tensors on the device, so it has no values either.
        pinned = kwargs.pop("pin_memory", False)
        if real and not pinned and not any(isinstance(t, FakeTensor) for t in inputs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # elsewhere autograd has decomposed such operations
            with self._again():
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        read = self._copied(func, inputs, args, kwargs)
        if read is not None:
            return read
        if func is aten._grouped_mm.default and inputs[0].dtype != torch.bfloat16:
            result = _grouped_product(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._remember(func, inputs, result)
        backward = bool(torch._C._current_autograd_node())
        purpose = self.purpose or ("temporaries" if backward else "activations")
        for tensor in tree_leaves(result) if purpose != SHAPES_ALONE else ():
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                self._holding(tensor).add(tensor, purpose)
        return result

    def numbers(self, tensor: Tensor) -> Tensor:
        """The values that the host reads from a tensor: those it wrote, or zeros if the device has
        changed them."""
        return getattr(tensor, _WRITTEN, torch.zeros(tensor.shape, dtype=tensor.dtype))

    def _remember(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        """Keep the values that the host writes into a tensor."""
        writes = func is aten._to_copy.default and not isinstance(inputs[0], FakeTensor)
        if writes and result.numel() <= MOST_KEPT:
            setattr(result, _WRITTEN, inputs[0])
        elif func._schema.is_mutable:
            for tensor in inputs:
                vars(tensor).pop(_WRITTEN, None)

    def _copied(
        self, func: Any, inputs: list[Tensor], args: Any, kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Record a copy between host and device that the host waits for; returns the values it
        reads, if any."""
        if func is aten._to_copy.default:
            source = inputs[0].device.type
            target = torch.device(kwargs.get("device") or inputs[0].device).type
        elif func is aten.copy_.default:
            source = inputs[1].device.type
            target = inputs[0].device.type
        else:
            return None
        if source == target or META.type in (source, target):
            return None
        if not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,))):
            self.wait(func.name().removeprefix("aten::"))
        into_fake = func is aten.copy_.default and isinstance(inputs[0], FakeTensor)
        if target == "cuda" or into_fake or self._holding(inputs[0]).purpose(inputs[0]) in HELD:
            return None
        with unset_fake_temporarily():
            return torch.zeros(inputs[0].shape, dtype=kwargs.get("dtype") or inputs[0].dtype)


def _grouped_product(left: Tensor, right: Tensor, *others: object, **kwargs: object) -> Tensor:
    """The product in another dtype than bfloat16, the only one that torch knows the shape for; GPUs
    take the others too."""
    as_known = [aten._to_copy.default(each, dtype=torch.bfloat16) for each in (left, right)]
    product = aten._grouped_mm.default(*as_known, *others, **kwargs)
    return aten._to_copy.default(product, dtype=kwargs.get("out_dtype") or left.dtype)


class _Fakes(FakeTensorMode):
    """Tells C++ that its tensors are on the meta device: a torch without CUDA has no code for CUDA
    tensors.

    C++ therefore makes new tensors on the meta device, which are put back on CUDA.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return META
        if kwargs and kwargs.get("device") == META:
            kwargs = {**kwargs, "device": CUDA}
        return super().dispatch(func, types, args, kwargs)
