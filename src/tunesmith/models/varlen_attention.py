"""Forest attention on CUDA: variable-length flash attention calls, merged by log-sum-exp.

The first call computes the causal attention of every segment to itself. Then one call per depth computes the attention
of all segments below that depth to their ancestors at it. Only the depth
of the forest decides the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from tunesmith.data.forest import Segment, subtree_ends
from tunesmith.models.attention import AttentionRule

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

    @classmethod
    def of(cls, queries: list[Run], keys: list[Run], *, causal: bool, device: torch.device) -> _Call:
        """A causal call takes all rows in order."""
        lengths = [[stop - start for start, stop in runs] for runs in (queries, keys)]
        ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths]
        longest = [max(each, default=0) for each in lengths]
        if causal:
            return cls(None, None, ends[0], ends[1], longest[0], longest[1], causal)
        rows = [torch.cat([torch.arange(*run) for run in runs]).to(device) for runs in (queries, keys)]
        return cls(rows[0], rows[1], ends[0], ends[1], longest[0], longest[1], causal)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """The kernels' arguments after the tensors, without dropout."""
        return self.query_ends, self.key_ends, self.longest_query, self.longest_key, 0.0, self.causal


class CudaFlash:
    """A kernel of ``ForestAttention`` for 16-bit tensors without windows and soft caps."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        own = [(s.start, s.start + s.length) for s in segments]
        stops = subtree_ends(segments)
        depths: list[int] = []
        for s in segments:
            depths.append(depths[s.parent] + 1 if s.parent >= 0 else 0)
        self.calls = [_Call.of(own, own, causal=True, device=device)]
        for depth in range(max(depths, default=0)):
            parents = [i for i, d in enumerate(depths) if d == depth and stops[i] > own[i][1]]
            below, above = [(own[i][1], stops[i]) for i in parents], [own[i] for i in parents]
            self.calls.append(_Call.of(below, above, causal=False, device=device))

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:
        dim, fits = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
        return query.is_cuda and fits and dim % 8 == 0 and dim <= 256 and rule.window is None and rule.softcap is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        return cast(Tensor, _Varlen.apply(self.calls, query, key, value, rule.scale))


def _rows(t: Tensor, at: Tensor | None) -> Tensor:
    return t.contiguous() if at is None else t.index_select(0, at)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: list[_Call], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for call in calls:
            rows = (_rows(query, call.queries), _rows(key, call.keys), _rows(value, call.keys))
            part, part_lse, *_ = _forward(*rows, *call.arguments, False, scale=scale)
            part, part_lse = part.float(), part_lse.transpose(0, 1)
            if call.queries is None:
                out, lse = part, part_lse.contiguous()
                continue
            before, before_lse = out[call.queries], lse[call.queries]
            share = torch.sigmoid(part_lse - before_lse).unsqueeze(-1)
            out[call.queries] = before.lerp(part, share)
            lse[call.queries] = torch.logaddexp(before_lse, part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        calls, scale = cast("list[_Call]", ctx.calls), cast(float, ctx.scale)
        grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)]
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        for call in calls:
            parts = _backward(
                _rows(grad_out, call.queries),
                _rows(query, call.queries),
                _rows(key, call.keys),
                _rows(value, call.keys),
                _rows(out, call.queries),
                _rows(lse, call.queries).transpose(0, 1).contiguous(),
                *call.arguments,
                unused,
                unused,
                scale=scale,
            )
            for total, part, at in zip(grads, parts, (call.queries, call.keys, call.keys), strict=True):
                if at is None:
                    total += part
                else:
                    total[at] += part.float()
        return None, *(g.to(query.dtype) for g in grads), None
