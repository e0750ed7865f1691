"""The kernels of ``kernels.logits`` in Triton; each reads the logits once."""

from __future__ import annotations

import torch
from torch import Tensor

from tunesmith.models.cuda.triton import usable
from tunesmith.models.kernels.logits import RowGradient


class CudaLogits:
    """See ``LogitKernels``."""

    def fits(self, logits: Tensor) -> bool:
        real = type(logits) is Tensor  # and not simulated
        plain = logits.is_contiguous() and logits.dtype == torch.float32
        return real and logits.is_cuda and plain and usable()

    def sums(self, logits: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        from tunesmith.models.cuda.logit_kernels import sums

        return sums(logits, entropy=entropy)

    def gradients(
        self, logits: Tensor, total: Tensor, of: RowGradient, dtype: torch.dtype
    ) -> Tensor:
        from tunesmith.models.cuda.logit_kernels import gradients

        return gradients(logits, total, of, dtype)


LOGITS = CudaLogits()
