"""A GPU that is not there: CUDA tensors with shapes, types and storages, and without numbers.

Operations on the CPU compute as ever. Whatever touches a CUDA tensor only says which tensor would come of it: an
operation that does not exist for the device, or mixes devices, raises as it would there. Where the host would wait for
the device, to read a number or to copy, the wait is noted, and zeros (or True) are read.
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

from tunesmith.fake_device.memory import MemoryUse
from tunesmith.fake_device.replaced import replaced
from tunesmith.fake_device.sharded import SHAPES_ALONE
from tunesmith.fake_device.threads import gpu_of_thread

PACKAGE = Path(__file__).parents[1]
HELD = ("weights", "gradients", "optimizer", "frozen models")
"""What a copy in host memory keeps, and does not read."""
MOST_KEPT = 2**16
"""Numbers of a tensor that the host wrote, which are kept for it to read."""
_WRITTEN = "_written_by_the_host"
CUDA, META = torch.device("cuda", 0), torch.device("meta")
aten = torch.ops.aten


class FakeDevice(TorchDispatchMode):
    """Inside, ``device="cuda"`` works without a GPU, and memory and waits are counted.

    Args:
        gpus: that this machine has; one of them is used.
        together: the most processes that share a model.
    """

    def __init__(self, gpus: int = 1, together: int = 1) -> None:
        super().__init__()
        self.gpus, self.together = gpus, together
        self.memories = defaultdict[str, MemoryUse](MemoryUse)
        """Of each GPU that processes of the run are on, by a name."""
        self.waits: Counter[str] = Counter()
        """Places at which the host waits for the device, as ``file:line operation``, and how often."""
        self.purpose: str | None = None
        """Of what is allocated; None: by whether a backward pass runs."""
        self._fakes = _Fakes(allow_non_fake_inputs=True)
        self._stack, self._one_at_a_time = ExitStack(), RLock()  # torch's mode is not for several threads at once

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
        """Of the GPU that this thread uses."""
        return self.memories[gpu_of_thread()]

    def _holding(self, tensor: Tensor) -> MemoryUse:
        """Of the GPU on which a tensor's storage is, or else of this thread's."""
        own = self.memory
        return next((memory for memory in [*self.memories.values()] if memory.purpose(tensor)), own)

    def assign(self, purpose: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what these tensors are for, on whichever GPU they are."""
        tensors = [*tensors]
        for memory in [*self.memories.values()]:  # more may come meanwhile
            memory.assign(purpose, tensors)

    @contextmanager
    def on_this_thread(self) -> Generator[None]:
        """Inside, a further thread uses the device."""
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
        """Whatever is allocated inside is for this ``purpose``."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def wait(self, operation: str) -> None:
        """Note that the host waits, at the innermost place in the product."""
        frame = sys._getframe(1)
        while frame.f_back and not _is_product(Path(frame.f_code.co_filename)):
            frame = frame.f_back
        place = Path(frame.f_code.co_filename)
        self.waits[f"{place.parent.name}/{place.name}:{frame.f_lineno} {operation}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return META
        with self._one_at_a_time:
            return self._result(func, args, dict(kwargs or {}))

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, DTensor | AsyncCollectiveTensor) for t in inputs):
            return NotImplemented  # they say themselves what becomes of the tensors in them
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return inputs[0]  # a fake one would be another tensor
        place = str(kwargs.get("device") or "cpu")
        real = place == "cpu" or (place == "meta" and func is aten._to_copy.default)
        pinned = kwargs.pop("pin_memory", False)  # as large as what the device has, so it has no numbers either
        if real and not pinned and not any(isinstance(t, FakeTensor) for t in inputs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # elsewhere autograd has taken such operations apart
            with self._again():
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        read = self._copied(func, inputs, args, kwargs)
        if read is not None:
            return read
        result = func(*args, **kwargs)
        self._remember(func, inputs, result)
        purpose = self.purpose or ("temporaries" if torch._C._current_autograd_node() else "activations")
        for tensor in tree_leaves(result):
            if purpose != SHAPES_ALONE and isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                self._holding(tensor).add(tensor, purpose)
        return result

    def numbers(self, tensor: Tensor) -> Tensor:
        """What the host reads of a tensor: what it wrote, or zeros where the device has changed that."""
        return getattr(tensor, _WRITTEN, torch.zeros(tensor.shape, dtype=tensor.dtype))

    def _remember(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        """Keep the numbers that the host writes into a tensor."""
        if func is aten._to_copy.default and not isinstance(inputs[0], FakeTensor) and result.numel() <= MOST_KEPT:
            setattr(result, _WRITTEN, inputs[0])
        elif func._schema.is_mutable:
            for tensor in inputs:
                vars(tensor).pop(_WRITTEN, None)

    def _copied(self, func: Any, inputs: list[Tensor], args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Note a copy between host and device that the host waits for; what it reads, if it reads."""
        if func is aten._to_copy.default:
            source, target = inputs[0].device.type, torch.device(kwargs.get("device") or inputs[0].device).type
        elif func is aten.copy_.default:
            source, target = inputs[1].device.type, inputs[0].device.type
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


class _Fakes(FakeTensorMode):
    """Tells C++ that its tensors are on the meta device: a torch without CUDA has no code for theirs.

    So C++ makes further ones on the meta device, which are put back.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return META
        if kwargs and kwargs.get("device") == META:
            kwargs = {**kwargs, "device": CUDA}
        return super().dispatch(func, types, args, kwargs)


def _is_product(file: Path) -> bool:
    return file.is_relative_to(PACKAGE) and file.parent.name != "fake_device"
