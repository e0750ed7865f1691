"""Loss scaling for float16, whose smallest positive value is 6e-8: gradients are computed for a scaled loss.

As in "Mixed Precision Training" (arXiv:1710.03740, section 3.2) and PyTorch's ``GradScaler``.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**16
LEAST = 1.0
GROWS_AFTER = 2000
"""Consecutive steps without overflow after which the factor doubles."""


class LossScale:
    """The factor of the loss. It halves when a gradient overflows; that optimizer step is then retried."""

    def __init__(self) -> None:
        self.factor, self.steps = FIRST, 0

    def update(self, finite: bool) -> bool:
        """Call this after each optimizer step, taken or dropped; returns whether a retry has a smaller factor."""
        self.steps = self.steps + 1 if finite else 0
        if self.steps == GROWS_AFTER:
            self.factor, self.steps = self.factor * 2, 0
        smaller = not finite and self.factor > LEAST
        if smaller:
            self.factor /= 2
        return smaller

    def state(self) -> Tensor:
        return torch.tensor([self.factor, self.steps], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        self.factor, self.steps = float(state[0]), int(state[1])
