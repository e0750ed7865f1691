"""Ring attention (arXiv:2310.01889) for a rank's part of a forest.

Keys and values travel around the ranks of a sequence group. Each rank computes the attention of its
queries to them and merges it with its previous result by log-sum-exp; in the backward pass the
gradients of keys and values travel along. Tokens are dealt one by one (as in striped attention,
arXiv:2311.09431), so all ranks have equal work at every stop: within a segment the ``i``-th token
of a rank sees the first ``i`` tokens of lower ranks and the first ``i - 1`` of higher ones.

Shape legend: ``s`` ranks, ``t`` tokens per rank, ``H`` query heads, ``K`` key/value heads, ``D``
head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunesmith.errors import ModelError
from tunesmith.models.forest import Segment, subtree_ends
from tunesmith.models.kernels.attention import (
    Attended,
    AttentionRule,
    add_sinks,
    merge,
    sinks_gradient,
)
from tunesmith.models.kernels.cpu_attention import CpuFlash
from tunesmith.models.kernels.varlen_attention import CudaFlash

PassOn = Callable[[Tensor], Tensor]
"""Sends a tensor ``[t, ...]`` to the next rank and returns the previous rank's."""


class Stop(NamedTuple):
    """Queries ``[start, stop)`` see keys ``[key_start, key_stop)``: all of them or, with equal
    counts, causally."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    causal: bool


Kernel = type[CpuFlash] | type[CudaFlash]
KERNELS: tuple[Kernel, ...] = (CpuFlash, CudaFlash)
_INSTEAD = 'set system.sequence_parallel.type = "ulysses"'


def check_ring(path: Any, config: Any) -> None:
    """Check that the attention of a model can be passed around a ring.

    Raises:
        ModelError: the model at ``path`` has attention windows, chunks or soft caps.
    """
    kinds: list[str] = getattr(config, "layer_types", None) or []
    windows = any("sliding" in kind or "chunked" in kind for kind in kinds)
    if not kinds:
        windows = getattr(config, "sliding_window", None)
    if windows or getattr(config, "attn_logit_softcapping", None):
        raise ModelError(
            "ring attention has no kernel for windows, chunks and soft caps, which "
            f"'{path}' has: {_INSTEAD}"
        )


def stops(segments: Sequence[Segment], rank: int, source: int, size: int) -> list[Stop]:
    """The stops at which queries of ``rank`` see keys of ``source``."""

    def first(token: int, of: int) -> int:
        """The index, among rank ``of``'s tokens, of its first one at or after ``token``."""
        return -((of - token) // size)

    found: list[Stop] = []
    later = int(source > rank)
    for segment, last in zip(segments, subtree_ends(segments), strict=True):
        end = segment.start + segment.length
        key_start = first(segment.start, source)
        stop = first(end, rank)
        if stop - later > key_start:
            found.append(Stop(key_start + later, stop, key_start, stop - later, causal=True))
        below = Stop(stop, first(last, rank), key_start, first(end, source), causal=False)
        if below.stop > below.start and below.key_stop > below.key_start:
            found.append(below)
    return found


class Ring:
    """An ``AttentionContext`` for the tokens of one rank's part.

    Args:
        pass_on: the exchange with the neighbours.
    """

    def __init__(self, segments: Sequence[Segment], rank: int, size: int, pass_on: PassOn) -> None:
        self.pass_on = pass_on
        # After n exchanges a rank holds the keys and values of the n-th rank before it.
        self.stops = [stops(segments, rank, (rank - n) % size, size) for n in range(size)]

    def attend(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        """See ``AttentionContext.attend``; on ``t`` tokens.

        Raises:
            ModelError: no flash kernel supports this rule, dtype or device.
        """
        kernel = next((kernel for kernel in KERNELS if kernel.supports(query, rule)), None)
        if kernel is None or rule.window is not None:
            raise ModelError(
                f"ring attention has no kernel for {query.dtype} on {query.device.type} with "
                f"{rule}: {_INSTEAD}"
            )
        return _Ring.apply(self, kernel, query, key, value, rule.scale, rule.sinks)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(query.shape, dtype=exact)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=exact)
        travelling = torch.stack([key, value], 1)
        for n, seen in enumerate(ring.stops):
            if n:
                travelling = ring.pass_on(travelling)
            k, v = travelling.unbind(1)
            for a, b, ka, kb, causal in seen:
                part, part_lse = kernel.forward(query[a:b], k[ka:kb], v[ka:kb], causal, scale)
                merge(out[a:b], lse[a:b], part, part_lse)
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.ring = ring
        ctx.kernel = kernel
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value, out, lse, sinks = ctx.saved_tensors
        of_sinks = None if sinks is None else sinks_gradient(sinks, grad_out, out, lse)
        ring: Ring = ctx.ring
        kernel: Kernel = ctx.kernel
        scale: float = ctx.scale
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        travelling = torch.stack([key, value], 1)
        grads = torch.zeros_like(travelling, dtype=lse.dtype)
        for n, seen in enumerate(ring.stops):
            if n:
                travelling = ring.pass_on(travelling)
                grads = ring.pass_on(grads)
            k, v = travelling.unbind(1)
            for a, b, ka, kb, causal in seen:
                kept = Attended(query[a:b], k[ka:kb], v[ka:kb], out[a:b], lse[a:b])
                dq, dk, dv = kernel.backward(grad_out[a:b], kept, causal, scale)
                grad_query[a:b] += dq
                grads[ka:kb, 0] += dk
                grads[ka:kb, 1] += dv
        grad_key, grad_value = ring.pass_on(grads).unbind(1)  # home
        own = (g.to(query.dtype) for g in (grad_query, grad_key, grad_value))
        return None, None, *own, None, of_sinks
