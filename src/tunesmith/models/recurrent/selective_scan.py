"""The selective state space of Mamba (arXiv:2312.00752), chunk by chunk.

A state ``h [d, N]`` decays and takes the input, with a rate of its own for each of its numbers:
``h ← exp(Δ A) h + Δ x B``, and the output is ``h C + D x``. Within a chunk all states come from
doublings: of spans of one token, two, four and so on.

Shape legend: ``T`` tokens, ``S`` sequences, ``d`` channels, ``N`` state size, ``c`` tokens of a
chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tunesmith.models.forest import PackedLengths
from tunesmith.models.recurrent.chunks import Chunks

CHUNK = 32
MOST = 1 << 22
"""The most states that are in memory at once, times the tensors of their doublings."""


def selective_scan(
    x: Tensor,
    delta: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor,
    lengths: PackedLengths,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, d]`` and the states ``[S, d, N]`` at the ends, both in float32 or wider.

    Args:
        x: ``[T, d]``.
        delta: ``Δ``, above zero, ``[T, d]``.
        rate: ``A``, below zero, ``[d, N]``.
        write: ``B [T, N]``.
        read: ``C [T, N]``.
        skip: ``D [d]``.
        lengths: of the ``S`` sequences.
        start: the states at their starts; None: zero.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, delta, rate, write, read = (t.to(wide) for t in (x, delta, rate, write, read))
    chunks = lengths.derive(Chunks, CHUNK, x.device)
    inputs, steps, b, c = (chunks.cut(t) for t in (x * delta, delta, write, read))

    def advance(
        state: Tensor, inputs: Tensor, steps: Tensor, b: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The states of a few channels in one step are in memory, in the backward pass too.
        channels = max(1, MOST // (inputs.shape[0] * inputs.shape[1] * rate.shape[1]))
        blocks = (inputs.split(channels, 2), steps.split(channels, 2), rate.split(channels))
        done = [
            checkpoint(
                _chunk,
                *(own, step, decay, b, c, before),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for own, step, decay, before in zip(*blocks, state.split(channels, 1), strict=True)
        ]
        outputs, states = zip(*done, strict=True)
        return torch.cat(outputs, 2), torch.cat(states, 1)

    zero = x.new_zeros(len(lengths), *rate.shape)
    out, end = chunks.scan(zero if start is None else start.to(wide), advance, inputs, steps, b, c)
    return chunks.join(out) + skip.to(wide) * x, end


def _chunk(
    inputs: Tensor, steps: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs ``[S, c, d]`` of a chunk of each sequence, and the states after it."""
    remaining = (steps.unsqueeze(-1) * rate).exp()  # [S, c, d, N]
    states = inputs.unsqueeze(-1) * write.unsqueeze(2)
    span = 1
    while span < inputs.shape[1]:
        earlier = remaining[:, span:] * states[:, :-span]
        states = torch.cat((states[:, :span], states[:, span:] + earlier), 1)
        both = remaining[:, span:] * remaining[:, :-span]
        remaining = torch.cat((remaining[:, :span], both), 1)
        span *= 2
    states = states + remaining * state.unsqueeze(1)
    return torch.einsum("scdn,scn->scd", states, read), states[:, -1]
