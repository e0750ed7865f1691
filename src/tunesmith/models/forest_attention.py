"""Attention over a token forest, exact in forward and gradient.

A row attends to its own segment causally and to each ancestor in full. Those parts are computed one by one
and merged by their log-sum-exp; backward runs each part's kernel with the *merged* output and log-sum-exp, from
which it recovers the part's share of the whole softmax (as in ring attention, arXiv:2310.01889). One autograd
function holds a whole layer, so taking a segment out of the flat tensors costs no autograd work.

Shape legend: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``G = H / K``, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tunesmith.data.forest import Forest, Segment, subtree_ends
from tunesmith.models import varlen_attention
from tunesmith.models.attention import AttentionRule

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class AncestorPart(NamedTuple):
    """Rows ``[start, stop)`` see all of rows ``[key_start, key_stop)``: descendants and their ancestor."""

    start: int
    stop: int
    key_start: int
    key_stop: int


class ForestAttention:
    """An ``AttentionContext`` in which every token sees its own path through the forest."""

    def __init__(self, forest: Forest | Sequence[Segment]) -> None:
        self.segments = tuple(forest.segments if isinstance(forest, Forest) else forest)
        self.causal = [(s.start, s.start + s.length) for s in self.segments]
        self.full = _full_parts(self.segments)
        self.longest_path = max(_path_lengths(self.segments), default=0)
        self._varlen: tuple[varlen_attention.Call, ...] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:  # noqa: ARG002
        """See ``AttentionContext.attend``; ``layer`` does not matter here."""
        plain = rule.softcap is None and (rule.window is None or rule.window >= self.longest_path)
        if plain and query.device.type == "cpu":
            return cast(Tensor, _CpuForestAttention.apply(self.causal, self.full, query, key, value, rule.scale))
        if plain and varlen_attention.available(query):
            if self._varlen is None:
                self._varlen = varlen_attention.plan(self.segments, query.device)
            return varlen_attention.attend(self._varlen, query, key, value, rule.scale)
        return _attend_eager(self.segments, query, key, value, rule)


def _full_parts(segments: Sequence[Segment]) -> list[AncestorPart]:
    """One part per segment that has descendants."""
    ends = zip(segments, subtree_ends(segments), strict=True)
    return [
        AncestorPart(s.start + s.length, stop, s.start, s.start + s.length)
        for s, stop in ends
        if stop > s.start + s.length
    ]


def _path_lengths(segments: Sequence[Segment]) -> list[int]:
    """Tokens from the root to the end of each segment."""
    lengths: list[int] = []
    for segment in segments:
        lengths.append(segment.length + (lengths[segment.parent] if segment.parent >= 0 else 0))
    return lengths


class _CpuForestAttention(torch.autograd.Function):
    """Parts by the CPU flash kernel. It takes strides, so grouped heads need no copies of keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        causal: list[tuple[int, int]],
        full: list[AncestorPart],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        q, k, v = _by_group(query, groups), _by_group(key, 1), _by_group(value, 1)
        exact = _accumulator(query.dtype)
        out = torch.empty(query.shape, dtype=exact if full else query.dtype)
        o = _by_group(out, groups)
        lse = torch.empty(q.shape[:-1], dtype=exact)
        for a, b in causal:
            ks, vs = (t[:, :, a:b].expand(-1, groups, -1, -1) for t in (k, v))
            o[:, :, a:b], lse[:, :, a:b] = _flash(q[:, :, a:b], ks, vs, 0.0, True, scale=scale)
        for a, b, ka, kb in full:
            part, part_lse = _flash(_fold(q[:, :, a:b]), k[:, :, ka:kb], v[:, :, ka:kb], 0.0, False, scale=scale)
            shape = (q.shape[0], groups, b - a)
            _merge(o[:, :, a:b], lse[:, :, a:b], part.view(*shape, -1), part_lse.view(shape))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.scale = (causal, full), scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        causal, full = cast("tuple[list[tuple[int, int]], list[AncestorPart]]", ctx.parts)
        scale, groups = cast(float, ctx.scale), query.shape[1] // key.shape[1]
        # In bfloat16 this kernel's backward is up to four times slower than in float32 (and less exact).
        exact = _accumulator(query.dtype)
        go, q, o = (_by_group(t.to(exact), groups) for t in (grad_out, query, out))
        k, v = _by_group(key.to(exact), 1), _by_group(value.to(exact), 1)
        grads = [torch.empty(t.shape, dtype=exact) for t in (query, key, value)]
        gq, gk, gv = _by_group(grads[0], groups), _by_group(grads[1], 1), _by_group(grads[2], 1)
        for a, b in causal:
            rows = slice(a, b)
            ks, vs = (t[:, :, rows].expand(-1, groups, -1, -1) for t in (k, v))
            dq, dk, dv = _flash_backward(
                go[:, :, rows], q[:, :, rows], ks, vs, o[:, :, rows], lse[:, :, rows], 0.0, True, scale=scale
            )
            gq[:, :, rows] = dq
            torch.sum(dk, 1, keepdim=True, out=gk[:, :, rows])
            torch.sum(dv, 1, keepdim=True, out=gv[:, :, rows])
        for a, b, ka, kb in full:
            gof, qf, of, lf = (_fold(t[:, :, a:b]) for t in (go, q, o, lse))
            dq, dk, dv = _flash_backward(gof, qf, k[:, :, ka:kb], v[:, :, ka:kb], of, lf, 0.0, False, scale=scale)
            gq[:, :, a:b] += dq.view(q.shape[0], groups, b - a, -1)
            gk[:, :, ka:kb] += dk
            gv[:, :, ka:kb] += dv
        return None, None, *(g.to(query.dtype) for g in grads), None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _by_group(t: Tensor, groups: int) -> Tensor:
    """``[T, K * groups, D]`` as a view ``[K, groups, T, D]``."""
    return t.unflatten(1, (-1, groups)).permute(1, 2, 0, 3)


def _fold(t: Tensor) -> Tensor:
    """Query heads of a group as further rows: ``[K, G, T, ...]`` to ``[K, 1, G * T, ...]``."""
    return t.flatten(1, 2).unsqueeze(1)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join a part into ``out`` and ``lse``, in place: softmax-weighted by their log-sum-exp."""
    share = torch.sigmoid(part_lse - lse)
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _attend_eager(
    segments: Sequence[Segment], query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
) -> Tensor:
    """Softmax over each segment's path, written out: for windows, soft caps, and devices without a kernel."""
    groups = query.shape[1] // key.shape[1]
    scale, window, softcap = rule
    lengths = [s.length for s in segments]
    # One split, not a slice per segment: the backward of a slice fills a tensor of the full size.
    keys, values = list(key.split(lengths)), list(value.split(lengths))
    outs: list[Tensor] = []
    for i, q in enumerate(query.split(lengths)):
        path = _path(segments, i)
        k, v = torch.cat([keys[j] for j in path]), torch.cat([values[j] for j in path])
        at = torch.arange(len(k), device=q.device)
        distance = at[len(k) - len(q) :, None] - at
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = torch.einsum("tkgd,skd->kgts", q.unflatten(1, (-1, groups)) * scale, k)
        scores = scores.to(_accumulator(q.dtype))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
        outs.append(torch.einsum("kgts,skd->tkgd", weights, v).flatten(1, 2))
    return torch.cat(outs) if outs else torch.zeros_like(query)


def _path(segments: Sequence[Segment], index: int) -> list[int]:
    path: list[int] = []
    while index >= 0:
        path.append(index)
        index = segments[index].parent
    return path[::-1]
