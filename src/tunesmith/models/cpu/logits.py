"""The kernels of ``kernels.logits`` for CPUs, in compiled operations that read a row while it is in
the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tunesmith.models.cpu.functions import usable
from tunesmith.models.cpu.native import OPERATIONS
from tunesmith.models.kernels.logits import RowGradient


class CpuLogits:
    """See ``LogitKernels``."""

    def fits(self, logits: Tensor) -> bool:
        plain = logits.is_contiguous() and logits.dtype == torch.float32 and logits.numel() > 0
        return type(logits) is Tensor and logits.device.type == "cpu" and plain and usable()

    def sums(self, logits: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return OPERATIONS.logit_sums(logits, entropy)

    def gradients(
        self,
        logits: Tensor,
        total: Tensor,
        of: RowGradient,
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor:
        OPERATIONS.logit_gradients(logits, total, of.constant, of.slope, of.at_token, of.token)
        return logits


LOGITS = CpuLogits()
