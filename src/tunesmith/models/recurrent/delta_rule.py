"""The gated delta rule (arXiv:2412.06464, equation 10), chunk by chunk.

With keys and queries of length 1, a state ``M [K, V]`` decays, forgets what it would answer to the
new key and learns the new value: ``M ← α (M − β k (kᵀ M)) + β k vᵀ``, and answers ``qᵀ M``. Within
a chunk, the updates are one triangular system (section 3.3 there); states pass from chunk to chunk.
In Kimi's delta attention (arXiv:2510.26692, equation 1), each channel of the keys has a decay of
its own. On a GPU the kernels of flash-linear-attention compute it, where they are installed.

Shape legend: ``T`` tokens, ``S`` sequences, ``H`` heads, ``K`` key size, ``V`` value size, ``N``
chunks, ``c`` tokens of a chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tunesmith.config.doors import Door
from tunesmith.models.forest import PackedLengths
from tunesmith.models.recurrent.chunks import Chunks, decay_between

CHUNK = 64
CHUNK_BY_CHANNEL = 16
"""Decays by channel are compared token by token, ``[c, c, K]``."""
_EPS = 1e-6  # as flash-linear-attention and transformers


class DeltaKernels(Protocol):
    """Kernels that compute the rule on a kind of device."""

    def fits(self, value: Tensor) -> bool:
        """Whether they take these values."""
        ...

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        lengths: PackedLengths,
        start: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See ``gated_delta_rule``."""
        ...


FUSED = Door[DeltaKernels]("delta_rules", "tunesmith.models.cuda.delta_rule:KERNELS")


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: PackedLengths,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Answers ``[T, H, V]`` in the dtype of the values, and the states ``[S, H, K, V]`` at the
    ends, in float32 or wider.

    Args:
        query, key: ``[T, H, K]``, of any length.
        value: ``[T, H, V]``.
        log_decay: ``log α``, ``[T, H]``, or by channel ``[T, H, K]``.
        beta: ``[T, H]``.
        lengths: of the ``S`` sequences.
        start: the states at their starts; None: zero.
    """
    kernels = next((room for room in FUSED.rooms if room.fits(value)), None)
    if kernels is not None:
        return kernels.run(query, key, value, log_decay, beta, lengths, start)
    wide = torch.promote_types(value.dtype, torch.float32)
    by_channel = log_decay.dim() == 3
    chunks = lengths.derive(Chunks, CHUNK_BY_CHANNEL if by_channel else CHUNK, value.device)
    log_decay = log_decay if by_channel else log_decay.unsqueeze(-1)
    q, k, v, g, b = (
        chunks.cut(x.to(wide)).transpose(1, 2)
        for x in (query, key, value, log_decay, beta.unsqueeze(-1))
    )  # [N, H, c, ...]
    q = _unit(q) * q.shape[-1] ** -0.5
    k = _unit(k)
    passed = g.cumsum(2)
    # Each update sees the ones before it; the diagonal of the system is one.
    system = _products(k * b, k, passed)
    known = torch.cat([v * b, k * b * passed.exp()], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = _products(q, k, passed)
    reading = q * passed.exp()
    writing = (k * (passed[..., -1:, :] - passed).exp()).transpose(-1, -2)
    remaining = passed[..., -1, :].exp().unsqueeze(-1)

    zero = q.new_zeros(len(lengths), q.shape[1], k.shape[-1], v.shape[-1])
    operands = (new, seen, reading, within, remaining, writing)
    out, end = chunks.scan(zero if start is None else start.to(wide), _advance, *operands)
    return chunks.join(out.transpose(1, 2)).to(value.dtype), end


def _advance(
    state: Tensor,
    new: Tensor,
    seen: Tensor,
    reading: Tensor,
    within: Tensor,
    remaining: Tensor,
    writing: Tensor,
) -> tuple[Tensor, Tensor]:
    """The answers of one chunk of each sequence, and the states after it."""
    update = new - seen @ state
    return reading @ state + within @ update, state * remaining + writing @ update


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _products(rows: Tensor, columns: Tensor, passed: Tensor) -> Tensor:
    """``[..., c, c]``: products of each token with the ones up to it, reduced by the decays between
    the two.

    Args:
        rows, columns: ``[..., c, K]``.
        passed: sums of ``log α`` up to each token, ``[..., c, 1 or K]``.
    """
    if passed.shape[-1] == 1:
        return (rows @ columns.transpose(-1, -2)) * decay_between(passed.squeeze(-1))
    decay = decay_between(passed.transpose(-1, -2))  # [..., K, c, c]
    return torch.einsum("...ik,...jk,...kij->...ij", rows, columns, decay)
