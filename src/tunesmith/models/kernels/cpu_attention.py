"""Forest attention on a CPU: compiled functions for all parts together (``functions``), or
PyTorch's flash kernel for each, merged by log-sum-exp.

A part is a segment's causal attention to itself, or the attention of all its descendants to the
whole segment. PyTorch's kernel takes strides, so grouped heads need no copies of keys and values.
One autograd function computes a whole layer, so slicing segments out of the flat tensors adds
nothing to the graph. The kernel's ``aten`` operators are private to torch: its public interface
does not return the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunesmith.models.forest import Segment, subtree_ends
from tunesmith.models.kernels.attention import (
    Attended,
    AttentionRule,
    Gradients,
    add_sinks,
    merge,
    sinks_gradient,
)
from tunesmith.models.kernels.functions import AttentionParts, which

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


_AncestorPart = tuple[int, int, int, int]
"""Rows ``[start, stop)``, the descendants of a segment, see all its rows ``[key_start,
key_stop)``."""


class CpuFlash:
    """A kernel of ``ForestAttention`` without windows and soft caps."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:  # noqa: ARG002
        self.causal = [(s.start, s.start + s.length) for s in segments]
        lasts = subtree_ends(segments)
        ends = zip(self.causal, lasts, strict=True)
        self.full = [(end, last, start, end) for (start, end), last in ends if last > end]
        rows = [(s.start, s.length, last) for s, last in zip(segments, lasts, strict=True)]
        self._table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).T.contiguous()
        """Each segment's start, length, and end of its descendants: ``[3, segments]``."""

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:
        return query.device.type == "cpu" and rule.window is None and rule.softcap is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        parts = (self.causal, self.full, self._table)
        return _CpuFlash.apply(*parts, query, key, value, rule.scale, rule.sinks)

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[n, H, D]`` and log-sum-exp ``[n, H]`` of one stop of a ``parallel.ring``, at
        least float32."""
        groups = query.shape[1] // key.shape[1]
        q, k, v = (
            _by_group(query, groups),
            *(_by_group(t, 1).expand(-1, groups, -1, -1) for t in (key, value)),
        )
        out, lse = _flash(q, k, v, 0.0, causal, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)

    @staticmethod
    def backward(grad: Tensor, kept: Attended, causal: bool, scale: float) -> Gradients:
        """Gradients from the merged output and log-sum-exp, at least float32."""
        query, key, value, out, lse = kept
        groups = query.shape[1] // key.shape[1]
        exact = lse.dtype
        go, q, o = (_by_group(t.to(exact), groups) for t in (grad, query, out))
        k, v = (_by_group(t.to(exact), 1).expand(-1, groups, -1, -1) for t in (key, value))
        within = lse.unflatten(1, (-1, groups)).permute(1, 2, 0)
        dq, dk, dv = _flash_backward(go, q, k, v, o, within, 0.0, causal, scale=scale)
        return dq.permute(2, 0, 1, 3).flatten(1, 2), *(t.sum(1).transpose(0, 1) for t in (dk, dv))


def attend_to_context(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
    """Causal attention ``[n, H, D]`` of the last ``n`` of ``c`` tokens, by a compiled function;
    None where there is none.

    Args:
        query: ``[n, H, D]``.
        key, value: ``[c, K, D]``.
    """
    here = query.device.type == "cpu"
    functions = which(lambda functions: here and functions.attends(query))
    if functions is None:
        return None
    table = torch.tensor([[0], [len(key)], [len(key)]])
    return functions.attend(table, query, key, value, scale)[0].to(query.dtype)


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        causal: list[tuple[int, int]],
        full: list[_AncestorPart],
        table: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        functions = which(lambda functions: functions.attends(query))
        if functions is not None:
            out, lse = functions.attend(table, query, key, value, scale)
            lse = lse.unflatten(0, groups)
        else:
            out, lse = _forward(causal, full, query, key, value, scale, exact=sinks is not None)
        if sinks is not None:
            add_sinks(out.unflatten(1, groups), lse.permute(2, 0, 1), sinks.view(groups))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.parts = (causal, full)
        ctx.table = table
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value, out, lse, sinks = ctx.saved_tensors
        causal: list[tuple[int, int]] = ctx.parts[0]
        full: list[_AncestorPart] = ctx.parts[1]
        scale: float = ctx.scale
        groups = query.shape[1] // key.shape[1]
        of_sinks = None
        if sinks is not None:
            of_sinks = sinks_gradient(sinks, grad_out, out, lse.permute(2, 0, 1).flatten(1))
        functions = which(lambda functions: functions.attends_backward(query))
        if functions is not None:
            parts = AttentionParts(ctx.table, query, key, value, out, grad_out, lse, scale)
            return None, None, None, *functions.attend_backward(parts), None, of_sinks
        # In bfloat16 this kernel's backward is up to four times slower than in float32 (and less
        # exact).
        exact = torch.promote_types(query.dtype, torch.float32)
        go, q, o = (_by_group(t.to(exact), groups) for t in (grad_out, query, out))
        k = _by_group(key.to(exact), 1)
        v = _by_group(value.to(exact), 1)
        grads = [torch.empty(t.shape, dtype=exact) for t in (query, key, value)]
        gq = _by_group(grads[0], groups)
        gk = _by_group(grads[1], 1)
        gv = _by_group(grads[2], 1)
        for a, b in causal:
            rows = slice(a, b)
            ks, vs = (t[:, :, rows].expand(-1, groups, -1, -1) for t in (k, v))
            dq, dk, dv = _flash_backward(
                go[:, :, rows],
                q[:, :, rows],
                ks,
                vs,
                o[:, :, rows],
                lse[:, :, rows],
                0.0,
                True,
                scale=scale,
            )
            gq[:, :, rows] = dq
            torch.sum(dk, 1, keepdim=True, out=gk[:, :, rows])
            torch.sum(dv, 1, keepdim=True, out=gv[:, :, rows])
        for a, b, ka, kb in full:
            gof, qf, of, lf = (_fold(t[:, :, a:b]) for t in (go, q, o, lse))
            dq, dk, dv = _flash_backward(
                gof, qf, k[:, :, ka:kb], v[:, :, ka:kb], of, lf, 0.0, False, scale=scale
            )
            gq[:, :, a:b] += dq.view(q.shape[0], groups, b - a, -1)
            gk[:, :, ka:kb] += dk
            gv[:, :, ka:kb] += dv
        return None, None, None, *(g.to(query.dtype) for g in grads), None, of_sinks


def _forward(
    causal: list[tuple[int, int]],
    full: list[_AncestorPart],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, D]``, not rounded to the query's dtype if it is merged or ``exact``, and
    log-sum-exp ``[K, G, T]``."""
    groups = query.shape[1] // key.shape[1]
    q = _by_group(query, groups)
    k = _by_group(key, 1)
    v = _by_group(value, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty(query.shape, dtype=wide if exact or full else query.dtype)
    o = _by_group(out, groups)
    lse = torch.empty(q.shape[:-1], dtype=wide)
    for a, b in causal:
        ks, vs = (t[:, :, a:b].expand(-1, groups, -1, -1) for t in (k, v))
        o[:, :, a:b], lse[:, :, a:b] = _flash(q[:, :, a:b], ks, vs, 0.0, True, scale=scale)
    for a, b, ka, kb in full:
        part, part_lse = _flash(
            _fold(q[:, :, a:b]), k[:, :, ka:kb], v[:, :, ka:kb], 0.0, False, scale=scale
        )
        shape = (q.shape[0], groups, b - a)
        merge(o[:, :, a:b], lse[:, :, a:b], part.view(*shape, -1), part_lse.view(shape))
    return out, lse


def _by_group(t: Tensor, groups: int) -> Tensor:
    """``[T, K * groups, D]`` as a view ``[K, groups, T, D]``."""
    return t.unflatten(1, (-1, groups)).permute(1, 2, 0, 3)


def _fold(t: Tensor) -> Tensor:
    """The query heads of a group as additional rows: ``[K, G, T, ...]`` to ``[K, 1, G * T,
    ...]``."""
    return t.flatten(1, 2).unsqueeze(1)
