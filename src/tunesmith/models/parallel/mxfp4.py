"""Weights in MXFP4, as gpt-oss is published: blocks of 32 numbers in 4 bits with a scale in 8."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of 4-bit floats: one sign bit, two exponent bits and one mantissa bit."""
_BIAS = 127


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights ``[experts, inputs, outputs]`` in bfloat16, which holds them exactly.

    Args:
        blocks: ``[experts, outputs, groups, 16]``, two numbers a byte, the first in its low half.
        scales: ``[experts, outputs, groups]``, exponents of two.
    """
    experts, outputs, groups = scales.shape
    weights = torch.empty(experts, 32 * groups, outputs, dtype=torch.bfloat16)
    for expert in range(experts):  # what is made on the way takes several times as much
        numbers = _pairs()[blocks[expert].int()]  # [outputs, groups, 16, 2]
        factors = _powers()[scales[expert].int()]
        weights[expert] = (numbers * factors[..., None, None]).reshape(outputs, -1).T
    return weights


@cache
def _pairs() -> Tensor:
    """The two numbers of each byte, ``[256, 2]``."""
    values = torch.tensor([*_MAGNITUDES, *(-size for size in _MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


@cache
def _powers() -> Tensor:
    """The factor of each scale; the last one says that the block is not a number."""
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS)
    powers[-1] = torch.nan
    return powers
