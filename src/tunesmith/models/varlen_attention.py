"""The parts of forest attention on CUDA: two kinds of variable-length flash attention calls.

All segments causally in one call; then, per depth, everything below that depth onto its ancestors there. The
number of calls is the depth of the forest, whatever its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from tunesmith.data.forest import Segment, subtree_ends

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


def available(query: Tensor) -> bool:
    """Whether the kernel takes such queries (``[T, H, D]``)."""
    dim = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call: runs of query rows, each onto its own run of key rows.

    ``queries`` and ``keys`` gather the rows, None where they are all rows in order.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_ends: Tensor  # [runs + 1] int32, from 0
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool

    @property
    def runs(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """As the kernels take them; no dropout."""
        return self.query_ends, self.key_ends, self.longest_query, self.longest_key, 0.0, self.causal


def plan(segments: Sequence[Segment], device: torch.device) -> tuple[Call, ...]:
    own = [(s.start, s.start + s.length) for s in segments]
    calls = [_call(own, own, causal=True, gather=False, device=device)]
    depths: list[int] = []
    for s in segments:
        depths.append(depths[s.parent] + 1 if s.parent >= 0 else 0)
    stops = subtree_ends(segments)
    for depth in range(max(depths, default=0)):
        parents = [i for i, d in enumerate(depths) if d == depth and stops[i] > own[i][1]]
        below = [(own[i][1], stops[i]) for i in parents]
        above = [own[i] for i in parents]
        calls.append(_call(below, above, causal=False, gather=True, device=device))
    return tuple(calls)


def _call(
    queries: list[tuple[int, int]],
    keys: list[tuple[int, int]],
    *,
    causal: bool,
    gather: bool,
    device: torch.device,
) -> Call:
    def rows(runs: list[tuple[int, int]]) -> Tensor | None:
        return torch.cat([torch.arange(a, b) for a, b in runs]).to(device) if gather else None

    def ends(runs: list[tuple[int, int]]) -> Tensor:
        return torch.tensor([0, *accumulate(b - a for a, b in runs)], dtype=torch.int32, device=device)

    longest = [max((b - a for a, b in runs), default=0) for runs in (queries, keys)]
    return Call(rows(queries), rows(keys), ends(queries), ends(keys), longest[0], longest[1], causal)


def attend(calls: tuple[Call, ...], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``[T, H, D]`` queries, ``[T, K, D]`` keys and values; differentiable."""
    return cast(Tensor, _Varlen.apply(calls, query, key, value, scale))


def _rows(t: Tensor, at: Tensor | None) -> Tensor:
    return t.contiguous() if at is None else t.index_select(0, at)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: tuple[Call, ...], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for call in calls:
            rows = (_rows(query, call.queries), _rows(key, call.keys), _rows(value, call.keys))
            part, part_lse, *_ = _forward(*rows, *call.runs, False, scale=scale)
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
        calls, scale = cast("tuple[Call, ...]", ctx.calls), cast(float, ctx.scale)
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
                *call.runs,
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
