"""Master weights, which an optimizer updates in place of a model's parameters."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tunesmith.models.kernels.gradient_sums import keep_sum
from tunesmith.models.parallel.experts import is_divided
from tunesmith.models.parallel.sharding import first_row, in_host_memory, local

MOST_ON_THE_WAY = 4
"""The most gradients that a GPU keeps while they are copied to host memory."""


class HostSums:
    """Adds gradients to sums in host memory. A GPU's are copied while the backward pass
    continues."""

    def __init__(self) -> None:
        self._on_the_way: deque[tuple[nn.Parameter, Tensor, torch.cuda.Event | None]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """Add ``grad``, a micro-batch's gradient of the weight on its own device."""
        arrived = None
        if grad.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(grad.device)
            self._stream.wait_stream(torch.cuda.current_stream(grad.device))
            with torch.cuda.stream(self._stream):
                copy = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
                copy.copy_(grad, non_blocking=True)
                grad.record_stream(self._stream)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
            grad = copy
        self._on_the_way.append((weight, grad, arrived))
        self.settle(MOST_ON_THE_WAY if arrived else 0)

    def settle(self, most: int = 0) -> None:
        """Add gradients as they arrive, until at most ``most`` are still being copied."""
        while len(self._on_the_way) > most:
            weight, grad, arrived = self._on_the_way.popleft()
            if arrived is not None:
                arrived.synchronize()
            _add(weight, grad)

    def forget(self) -> None:
        self._on_the_way.clear()


def _add(weight: nn.Parameter, grad: Tensor) -> None:
    """Add to the weight's gradient, in the weight's dtype."""
    if weight.grad is None:
        weight.grad = grad.to(weight.dtype, copy=True)
    else:
        weight.grad += grad


class Master:
    """The weights of one parameter that the optimizer updates, in float32 or wider.

    They are the parameter itself if it is that wide, otherwise a copy of it. If the parameter is
    sharded over ranks, they are this rank's rows; rows in host memory are updated in place.

    Args:
        host: adds up gradients in host memory.
        copy: the weights, if they are in host memory too.
    """

    def __init__(
        self, parameter: nn.Parameter, host: HostSums | None = None, copy: Tensor | None = None
    ) -> None:
        self.parameter = parameter
        self.sharded = isinstance(parameter, DTensor)
        self.away = in_host_memory(parameter)
        summed = self.sharded and not is_divided(parameter)  # by FSDP, in float32
        self._host = host = None if self.away else host
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.copied = host is not None or parameter.dtype != wide
        if copy is not None:
            self.weight = nn.Parameter(copy)
        elif self.copied or self.sharded:  # rows that are wide already are not copied
            self.weight = nn.Parameter(self.rows.to(wide))
        else:
            self.weight = parameter
        self._accumulates = self.copied and (host is not None or not summed)
        if self._accumulates:
            # FSDP calls it after summing over the ranks.
            parameter.register_post_accumulate_grad_hook(self._accumulate)
            if host is None and not self.sharded:
                keep_sum(parameter, self._sum)
        self._memory: Tensor | None = None

    def _sum(self) -> tuple[Tensor, bool]:
        """See ``GradientSum``. The buffer is reused: the first touch of a page costs several times
        a later one."""
        adds = self.weight.grad is not None
        if not adds:
            self._memory = torch.empty_like(self.weight) if self._memory is None else self._memory
            self.weight.grad = self._memory
        assert self.weight.grad is not None
        return self.weight.grad, adds

    @property
    def rows(self) -> Tensor:
        """This rank's part of the parameter, as a view of where it is stored."""
        return local(self.parameter.detach())

    @property
    def first_row(self) -> int | None:
        """The first row that this rank has; None if it has all."""
        return first_row(self.parameter) if self.sharded else None

    def _accumulate(self, parameter: Tensor) -> None:
        """Add a micro-batch's gradient, or its rows, to the sum, which has the master weights'
        dtype."""
        if parameter.grad is None:  # it was added to the sum already
            return
        (self._host.add if self._host else _add)(self.weight, local(parameter.grad))
        parameter.grad = None

    def arrive(self) -> None:
        """After a backward pass, add the gradient that FSDP copied to host memory.

        With a gradient hook instead, FSDP would wait for each gradient separately.
        """
        self._accumulate(self.parameter)

    def take_gradient(self) -> None:
        """Give the weights their rows of a sharded parameter's gradient, unless they already have
        them."""
        if self.sharded and not self._accumulates and not self.away:
            grad = self.parameter.grad
            self.weight.grad = None if grad is None else local(grad)

    def publish(self) -> None:
        """Round the weights into the parameter."""
        if self.copied:
            self.rows.copy_(self.weight, non_blocking=True)

    def refresh(self) -> None:
        """Set the weights to the parameter's values."""
        if self.copied:
            self.weight.copy_(self.rows)

    def clear(self) -> None:
        self.parameter.grad = self.weight.grad = None

    def free(self) -> None:
        """Free the memory of the next gradient."""
        self._memory = None
