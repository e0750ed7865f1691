"""Causal convolutions of each channel, over packed sequences.

Shape legend: ``T`` tokens, ``S`` sequences, ``d`` channels, ``w`` width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
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
    runs = [
        rows
        for before, own in zip(window.to(x.dtype), x.split(list(lengths)), strict=True)
        for rows in (before, own)
    ]
    rows = torch.cat(runs)
    inside: list[int] = []
    ends: list[int] = []
    at = 0
    for length in lengths:
        inside.extend(range(at, at + length))
        ends.extend(range(at + length, at + length + past))
        at += length + past
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).t()
    count = len(rows) - past
    out = rows.new_zeros(()).to(wide) if bias is None else bias.to(wide)
    for tap in range(past + 1):
        out = out + rows[tap : tap + count] * taps[tap]
    chosen = out.index_select(0, torch.tensor(inside, device=x.device))
    if activate is not None:
        chosen = activate(chosen)
    end = rows.index_select(0, torch.tensor(ends, device=x.device, dtype=torch.int64))
    return chosen.to(x.dtype), end.view(len(lengths), past, x.shape[1])
