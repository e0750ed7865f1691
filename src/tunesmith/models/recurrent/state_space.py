"""The state space of Mamba-2 (arXiv:2405.21060, section 6), chunk by chunk.

A state ``h [P, N]`` of each head decays and takes the input: ``h ← exp(Δ a) h + Δ x Bᵀ``, and the
output is ``h C + D x``. Heads of a group share ``B`` and ``C``.

Shape legend: ``T`` tokens, ``S`` sequences, ``H`` heads, ``P`` head size, ``G`` groups, ``N`` state
size, ``c`` tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tunesmith.models.forest import PackedLengths
from tunesmith.models.recurrent.chunks import Chunks, decay_between

CHUNK = 64


def state_space(
    x: Tensor,
    delta: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor,
    lengths: PackedLengths,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, H, P]`` and the states ``[S, H, P, N]`` at the ends, both in float32 or wider.

    Args:
        x: ``[T, H, P]``.
        delta: ``Δ``, above zero, ``[T, H]``.
        rate: ``a``, below zero, ``[H]``.
        write: ``B [T, G, N]``.
        read: ``C [T, G, N]``.
        skip: ``D [H]``.
        lengths: of the ``S`` sequences.
        start: the states at their starts; None: zero.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = x.shape[1] // write.shape[1]
    x, delta, rate, write, read = (t.to(wide) for t in (x, delta, rate, write, read))
    chunks = lengths.derive(Chunks, CHUNK, x.device)
    inputs, passed = (
        chunks.cut(t).transpose(1, 2) for t in (x * delta.unsqueeze(-1), rate * delta)
    )  # [chunks, H, c, ...]
    b, c = (chunks.cut(t).transpose(1, 2) for t in (write, read))  # [chunks, G, c, N]
    passed = passed.cumsum(2)
    similar = (c @ b.transpose(-1, -2)).repeat_interleave(heads, 1)
    within = (similar * decay_between(passed)) @ inputs
    reading = c.repeat_interleave(heads, 1) * passed.exp().unsqueeze(-1)
    writing = b.repeat_interleave(heads, 1) * (passed[..., -1:] - passed).exp().unsqueeze(-1)
    written = inputs.transpose(-1, -2) @ writing  # [chunks, H, P, N]
    remaining = passed[..., -1].exp()[..., None, None]

    zero = x.new_zeros(len(lengths), *x.shape[1:], write.shape[-1])
    operands = (within, reading, remaining, written)
    out, end = chunks.scan(zero if start is None else start.to(wide), _advance, *operands)
    return chunks.join(out.transpose(1, 2)) + skip.to(wide).unsqueeze(-1) * x, end


def _advance(
    state: Tensor, within: Tensor, reading: Tensor, remaining: Tensor, written: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of one chunk of each sequence, and the states after it."""
    return within + reading @ state.transpose(-1, -2), state * remaining + written
