"""The port of kernels that reduce logits, for the fused head of a trainer's passes.

``head`` computes with PyTorch's operations, each of which reads all logits, where there are none.

Shape legend: ``c`` rows, ``v`` vocabulary tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tunesmith.config.doors import Door


@dataclass(frozen=True, slots=True)
class RowGradient:
    """The gradient of a row's logits ``z`` with probabilities ``p``: ``p (constant + slope log p)``
    and at the row's token also ``at_token``. ``[c]`` each."""

    constant: Tensor
    slope: Tensor | None
    at_token: Tensor
    token: Tensor
    """Its index, int64."""


class LogitKernels(Protocol):
    def fits(self, logits: Tensor) -> bool:
        """Whether they take these logits."""
        ...

    def sums(self, logits: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """``logsumexp(z)`` of each row, and the entropy of ``softmax(z)`` if it is asked for."""
        ...

    def gradients(
        self, logits: Tensor, total: Tensor, of: RowGradient, dtype: torch.dtype
    ) -> Tensor:
        """The gradients ``[c, v]``, rounded once to ``dtype`` or a wider one; they may be written
        over the logits.

        Args:
            total: logsumexp over the whole vocabulary, ``[c]``.
        """
        ...


LOGITS = Door[LogitKernels](
    "logits", "tunesmith.models.cuda.logits:LOGITS", "tunesmith.models.cpu.logits:LOGITS"
)


def logit_kernels(logits: Tensor) -> LogitKernels | None:
    """The first registered kernels that take these logits."""
    return next((room for room in LOGITS.rooms if room.fits(logits)), None)
