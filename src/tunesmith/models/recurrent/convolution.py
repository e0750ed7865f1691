"""Causal convolutions of each channel, over packed sequences.

Shape legend: ``T`` tokens, ``S`` sequences, ``d`` channels, ``w`` width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from tunesmith.models.forest import PackedLengths


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: PackedLengths,
    window: Tensor | None,
    *,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each sequence with what came before it.

    Args:
        x: ``[T, d]``.
        weight: ``[d, w]``.
        bias: ``[d]``.
        lengths: of the ``S`` sequences.
        window: the inputs before each, ``[S, w - 1, d]``; None: sequences start, with zeros.
        activate: a function of each output, in float32 or wider.

    Returns:
        ``[T, d]``, and the windows at the ends.
    """
    past = weight.shape[1] - 1
    if window is None:
        window = x.new_zeros(len(lengths), past, x.shape[1])
    pairs = zip(window.to(x.dtype), x.split(list(lengths)), strict=True)
    rows = torch.cat([*chain.from_iterable(pairs)])
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).t()
    count = len(rows) - past
    out = rows.new_zeros(()).to(wide) if bias is None else bias.to(wide)
    for tap in range(past + 1):
        out = out + rows[tap : tap + count] * taps[tap]
    inside, ends = lengths.derive(_rows, past, x.device)
    chosen = out.index_select(0, inside)
    if activate is not None:
        chosen = activate(chosen)
    return chosen.to(x.dtype), rows.index_select(0, ends).view(len(lengths), past, x.shape[1])


def _rows(lengths: PackedLengths, past: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For sequences that each follow their window: the outputs that belong to their tokens, counted
    from the first output with a whole window, and the inputs that are the windows at their ends."""
    inside: list[int] = []
    ends: list[int] = []
    at = 0
    for length in lengths:
        inside.extend(range(at, at + length))
        ends.extend(range(at + length, at + length + past))
        at += length + past
    return torch.tensor(inside, device=device), torch.tensor(ends, device=device).long()
