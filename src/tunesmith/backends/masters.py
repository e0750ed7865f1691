"""The weights that an optimizer moves in the place of a model's parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tunesmith.models.sharding import first_row, local


class Master:
    """The weights of one parameter that the optimizer moves, in float32 or wider.

    They are the parameter itself if it is that wide, else a copy of it. Of a parameter that is sharded over ranks they
    are this rank's rows.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.sharded = isinstance(parameter, DTensor)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.copied = parameter.dtype != wide
        own = not self.sharded and not self.copied
        self.weight = parameter if own else nn.Parameter(self.rows.to(wide))  # rows that are wide share their memory
        if self.copied and not self.sharded:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    @property
    def rows(self) -> Tensor:
        """What this rank has of the parameter, as a view."""
        return local(self.parameter.detach())

    @property
    def first_row(self) -> int | None:
        """The first row that this rank has; None if it has all."""
        return first_row(self.parameter) if self.sharded else None

    def _accumulate(self, narrow: Tensor) -> None:
        """Add a micro-batch's gradient to the sum, which is as wide as the weights."""
        assert narrow.grad is not None
        if self.weight.grad is None:
            self.weight.grad = narrow.grad.to(self.weight.dtype)
        else:
            self.weight.grad += narrow.grad
        narrow.grad = None

    def take_gradient(self) -> None:
        """Give the weights their rows of a sharded parameter's gradient."""
        if self.sharded:
            grad = self.parameter.grad
            self.weight.grad = None if grad is None else local(grad)

    def publish(self) -> None:
        """Round the weights into the parameter."""
        if self.copied:
            self.rows.copy_(self.weight)

    def refresh(self) -> None:
        """Take the parameter's numbers as the weights."""
        if self.copied:
            self.weight.copy_(self.rows)

    def clear(self) -> None:
        self.parameter.grad = self.weight.grad = None

    def move(self, device: torch.device | str) -> None:
        """Put a copy on another device."""
        if self.copied:
            self.weight.data = self.weight.data.to(device)
