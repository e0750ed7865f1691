"""The gated delta rule by the kernels of flash-linear-attention, where that package is installed.

They take packed sequences with a state at the start of each, give the states at the ends, and carry
gradients through both, as ``recurrent.delta_rule`` does.

Shape legend: ``T`` tokens, ``S`` sequences, ``H`` heads, ``K`` key size, ``V`` value size.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from tunesmith.models.cuda.triton import usable
from tunesmith.models.forest import PackedLengths


@cache
def installed() -> bool:
    return usable() and find_spec("fla") is not None


class FlashLinearAttention:
    """Implements ``DeltaKernels``."""

    @staticmethod
    def fits(value: Tensor) -> bool:
        """Values in 16 bits on a GPU."""
        on_gpu = value.device.type == "cuda" and value.dtype.itemsize == 2
        return on_gpu and installed() and detect_fake_mode() is None

    @staticmethod
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        lengths: PackedLengths,
        start: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See ``recurrent.delta_rule.gated_delta_rule``."""
        by_channel = log_decay.dim() == 3
        package = import_module("fla.ops.kda" if by_channel else "fla.ops.gated_delta_rule")
        rule = package.chunk_kda if by_channel else package.chunk_gated_delta_rule
        out, end = rule(
            *(part.to(value.dtype).unsqueeze(0) for part in (query, key, value)),
            log_decay.float().unsqueeze(0),
            beta.to(value.dtype).unsqueeze(0),
            initial_state=None if start is None else start.float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=lengths.derive(_bounds, value.device),
        )
        return out[0], end


KERNELS = FlashLinearAttention()


def _bounds(lengths: PackedLengths, device: torch.device) -> Tensor:
    """``[S + 1]``: where each sequence starts, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device)
