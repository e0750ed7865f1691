"""Forest attention on CUDA: variable-length flash attention calls, merged by log-sum-exp.

Without a window, the first call computes the causal attention of every segment to itself. Then one
call per depth computes the attention of all segments below that depth to their ancestors at it. The
number of calls depends only on the depth of the forest. With a window, one call computes every
segment's attention to itself and the end of its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tunesmith.models.forest import Segment, subtree_ends
from tunesmith.models.kernels.attention import AttentionRule, merge, on_gpu

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default
Run = tuple[int, int]
"""Rows ``[start, stop)``."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call: each run of query rows attends to its own run of key rows.

    ``queries`` and ``keys`` are the indices of the rows; None: all rows in order.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_ends: Tensor  # [runs + 1] int32, from 0
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    """The last query of a run sees all its keys, the one before it all but the last key, and so
    on."""
    window: int | None = None

    @classmethod
    def in_window(
        cls, segments: Sequence[Segment], own: list[Run], window: int, device: torch.device
    ) -> _Call:
        """Every segment's attention to its own rows and to the last ``window - 1`` rows of its
        path."""
        seen: list[list[Run]] = []
        for segment, run in zip(segments, own, strict=True):
            path = [run]
            left = window - 1
            parent = segment.parent
            while parent >= 0 and left > 0:
                start, stop = own[parent]
                path.insert(0, (max(start, stop - left), stop))
                left = left - (stop - start)
                parent = segments[parent].parent
            seen.append(path)
        keys = _indices([run for path in seen for run in path], device)
        lengths = [(0, sum(stop - start for start, stop in path)) for path in seen]
        return cls(None, keys, *_both(own, lengths, device), causal=True, window=window)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """The kernels' arguments after the tensors, without dropout."""
        return (
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            0.0,
            self.causal,
        )

    @property
    def options(self) -> dict[str, int]:
        return (
            {}
            if self.window is None
            else {"window_size_left": self.window - 1, "window_size_right": 0}
        )


def _ends(runs: list[Run], device: torch.device) -> tuple[Tensor, int]:
    """Cumulative ends of the concatenated runs, starting with 0, and the longest run."""
    lengths = [stop - start for start, stop in runs]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    # Without non_blocking the host would wait for all pending work on the device.
    return ends.to(device, non_blocking=True), max(lengths, default=0)


def _both(
    queries: list[Run], keys: list[Run], device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    (query_ends, longest_query), (key_ends, longest_key) = (
        _ends(queries, device),
        _ends(keys, device),
    )
    return query_ends, key_ends, longest_query, longest_key


def _indices(runs: list[Run], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*run) for run in runs]).to(device, non_blocking=True)


class CudaFlash:
    """A kernel of ``ForestAttention`` for 16-bit tensors without soft caps."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.device = device
        self.own = own = [(s.start, s.start + s.length) for s in segments]
        stops = subtree_ends(segments)
        depths: list[int] = []
        for s in segments:
            depths.append(depths[s.parent] + 1 if s.parent >= 0 else 0)
        self.calls = [_Call(None, None, *_both(own, own, device), causal=True)]
        for depth in range(max(depths, default=0)):
            parents = [i for i, d in enumerate(depths) if d == depth and stops[i] > own[i][1]]
            below = [(own[i][1], stops[i]) for i in parents]
            above = [own[i] for i in parents]
            rows = _indices(below, device), _indices(above, device)
            self.calls.append(_Call(*rows, *_both(below, above, device), causal=False))
        self.windowed: dict[int, _Call] = {}

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:
        dim = query.shape[-1]
        return on_gpu(query) and dim % 8 == 0 and dim <= 256 and rule.softcap is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        calls = self.calls
        if rule.window is not None:
            if rule.window not in self.windowed:
                self.windowed[rule.window] = _Call.in_window(
                    self.segments, self.own, rule.window, self.device
                )
            calls = [self.windowed[rule.window]]
        return _Varlen.apply(calls, query, key, value, rule.scale)

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``CpuFlash.forward``."""
        rows = (t.contiguous() for t in (query, key, value))
        out, lse, *_ = _forward(*rows, *_whole(query, key, causal).arguments, False, scale=scale)
        return out.float(), lse.transpose(0, 1)

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``CpuFlash.backward``."""
        rows = (t.contiguous() for t in (grad, query, key, value, out, lse.transpose(0, 1)))
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        dq, dk, dv = _backward(
            *rows, *_whole(query, key, causal).arguments, unused, unused, scale=scale
        )
        return dq.float(), dk.float(), dv.float()


def _whole(query: Tensor, key: Tensor, causal: bool) -> _Call:
    """One run of all queries and one of all keys."""
    return _Call(
        None, None, *_both([(0, len(query))], [(0, len(key))], query.device), causal=causal
    )


def _rows(t: Tensor, at: Tensor | None) -> Tensor:
    return t.contiguous() if at is None else t.index_select(0, at)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, calls: list[_Call], query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for call in calls:
            rows = (_rows(query, call.queries), _rows(key, call.keys), _rows(value, call.keys))
            part, part_lse, *_ = _forward(
                *rows, *call.arguments, False, scale=scale, **call.options
            )
            part = part.float()
            part_lse = part_lse.transpose(0, 1)
            if call.queries is None:
                out = part
                lse = part_lse.contiguous()
                continue
            both = out[call.queries]
            both_lse = lse[call.queries]
            merge(both, both_lse, part, part_lse)
            out[call.queries], lse[call.queries] = both, both_lse
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls = calls
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value, out, lse = ctx.saved_tensors
        calls: list[_Call] = ctx.calls
        scale: float = ctx.scale
        grads = [
            torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)
        ]
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        for call in calls:
            grad, q, o = (_rows(t, call.queries) for t in (grad_out, query, out))
            k, v = (_rows(t, call.keys) for t in (key, value))
            seen = _rows(lse, call.queries).transpose(0, 1).contiguous()
            parts = _backward(
                grad, q, k, v, o, seen, *call.arguments, unused, unused, scale=scale, **call.options
            )
            for total, part, at in zip(
                grads, parts, (call.queries, call.keys, call.keys), strict=True
            ):
                if at is None:
                    total += part
                else:  # windows of siblings overlap in their ancestors' rows
                    total.index_add_(0, at, part.float())
        return None, *(g.to(query.dtype) for g in grads), None
