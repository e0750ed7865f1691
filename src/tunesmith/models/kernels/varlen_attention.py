"""Forest attention on CUDA: variable-length flash attention calls, merged by log-sum-exp.

Without a window, the first call computes the causal attention of every segment to itself. Then one
call per depth computes the attention of all segments below that depth to their ancestors at it. The
number of calls depends only on the depth of the forest. With a window, one call computes every
segment's attention to itself and the end of its path.

On Hopper these are calls of FlashAttention 3, where it is installed (``flash3``). Else long
segments attend to themselves there by cuDNN's kernel, one by one: it takes half the time of flash
attention 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.models.forest import Segment, subtree_ends
from tunesmith.models.kernels.attention import (
    Attended,
    AttentionRule,
    Gradients,
    add_sinks,
    merge,
    on_gpu,
    sinks_gradient,
)
from tunesmith.models.kernels.flash3 import flash3_problem, is_hopper

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default
_dense_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_dense_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
Run = tuple[int, int]
"""Rows ``[start, stop)``."""
Rows = Tensor | slice | None
"""Indices of rows; None: all in order."""
LONG = 2048
"""Tokens from which a segment is worth a call of cuDNN's kernel."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call: each run of query rows attends to its own run of key rows."""

    queries: Rows
    keys: Rows
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
        runs = [run for path in seen for run in path]
        keys = None if runs == own else _indices(runs, device)
        lengths = [(0, sum(stop - start for start, stop in path)) for path in seen]
        return cls(None, keys, *_both(own, lengths, device), causal=True, window=window)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """The kernels' arguments after the tensors, without dropout."""
        longest = self.longest_query, self.longest_key
        return self.query_ends, self.key_ends, *longest, 0.0, self.causal

    @property
    def options(self) -> dict[str, int]:
        if self.window is None:
            return {}
        return {"window_size_left": self.window - 1, "window_size_right": 0}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The output of the rows ``queries`` and its log-sum-exp ``[rows, H]``."""
        rows = (_rows(query, self.queries), _rows(key, self.keys), _rows(value, self.keys))
        out, lse, *_ = _forward(*rows, *self.arguments, False, scale=scale, **self.options)
        return out, lse.transpose(0, 1).contiguous()

    def backward(self, grad: Tensor, kept: Attended, scale: float) -> Gradients:
        """The gradients of the rows ``queries`` and ``keys``."""
        grad, query, out = (_rows(t, self.queries) for t in (grad, kept.query, kept.out))
        key, value = (_rows(t, self.keys) for t in (kept.key, kept.value))
        seen = _rows(kept.lse, self.queries).transpose(0, 1).contiguous()
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return _backward(
            grad, query, key, value, out, seen, *self.arguments, unused, unused, scale=scale,
            **self.options,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Dense:
    """cuDNN's causal attention of one run of rows to itself.

    It prepares each length anew, so rows are padded to one of few lengths. Earlier rows do not see
    the padding.
    """

    queries: slice

    @property
    def keys(self) -> slice:
        return self.queries

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``_Call.forward``."""
        rows = (self._padded(t) for t in (query, key, value))
        out, lse, *_ = _dense_forward(*rows, None, True, 0.0, True, False, scale=scale)
        return self._real(out), lse[0, :, : self._length, 0].t().contiguous()

    def backward(self, grad: Tensor, kept: Attended, scale: float) -> Gradients:
        """See ``_Call.backward``."""
        *tensors, lse = kept
        rows = [self._padded(t) for t in (grad, *tensors, lse.unsqueeze(-1))]
        rows[-1] = rows[-1].contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=grad.device)
        longest = rows[0].shape[2]
        parts = _dense_backward(
            *rows, no_dropout, no_dropout, None, None, None, longest, longest, 0.0, True,
            scale=scale,
        )  # fmt: skip
        of_query, of_key, of_value = map(self._real, parts)
        return of_query, of_key, of_value

    @property
    def _length(self) -> int:
        return self.queries.stop - self.queries.start

    def _padded(self, t: Tensor) -> Tensor:
        """``[1, H, padded, D]`` of ``[T, H, D]``."""
        missing = padded_length(self._length) - self._length
        rows = F.pad(t[self.queries], (0, 0, 0, 0, 0, missing)) if missing else t[self.queries]
        return rows.contiguous().transpose(0, 1).unsqueeze(0)

    def _real(self, t: Tensor) -> Tensor:
        return t[0].transpose(0, 1)[: self._length]


def padded_length(length: int) -> int:
    """At most a sixteenth longer; there are sixteen such lengths up to each doubling."""
    step = 1 << max(0, length.bit_length() - 5)
    return -(-length // step) * step


def _ends(runs: list[Run], device: torch.device) -> tuple[Tensor, int]:
    """Cumulative ends of the concatenated runs, starting with 0, and the longest run."""
    lengths = [stop - start for start, stop in runs]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    # Without non_blocking the host would wait for all pending work on the device.
    return ends.to(device, non_blocking=True), max(lengths, default=0)


def _both(
    queries: list[Run], keys: list[Run], device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    query_ends, longest_query = _ends(queries, device)
    key_ends, longest_key = _ends(keys, device)
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
        self.above: list[_Call] = []
        for depth in range(max(depths, default=0)):
            parents = [i for i, d in enumerate(depths) if d == depth and stops[i] > own[i][1]]
            below = [(own[i][1], stops[i]) for i in parents]
            above = [own[i] for i in parents]
            rows = _indices(below, device), _indices(above, device)
            self.above.append(_Call(*rows, *_both(below, above, device), causal=False))
        self.itself: dict[bool, list[_Call | _Dense]] = {}
        self.windowed: dict[int, _Call] = {}

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:
        dim = query.shape[-1]
        return on_gpu(query) and dim % 8 == 0 and dim <= 256 and rule.softcap is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        fast = takes_flash3(query)
        if rule.window is not None:
            if rule.window not in self.windowed:
                self.windowed[rule.window] = _Call.in_window(
                    self.segments, self.own, rule.window, self.device
                )
            windowed = [self.windowed[rule.window]]
            return _Varlen.apply(windowed, [], query, key, value, rule.scale, rule.sinks)
        dense = not fast and takes_dense(query)
        if dense not in self.itself:
            self.itself[dense] = self._to_themselves(dense=dense)
        calls = (self.itself[dense], self.above)
        return _Varlen.apply(*calls, query, key, value, rule.scale, rule.sinks)

    def _to_themselves(self, *, dense: bool) -> list[_Call | _Dense]:
        """The calls of every segment's attention to itself."""
        long = [run for run in self.own if dense and run[1] - run[0] >= LONG]
        short = [run for run in self.own if run not in long] if long else self.own
        calls: list[_Call | _Dense] = [_Dense(slice(*run)) for run in long]
        if short:
            rows = _indices(short, self.device) if long else None
            calls.append(_Call(rows, rows, *_both(short, short, self.device), causal=True))
        return calls

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``CpuFlash.forward``."""
        out, lse = _whole(query, key, causal).forward(query, key, value, scale)
        return out.float(), lse

    @staticmethod
    def backward(grad: Tensor, kept: Attended, causal: bool, scale: float) -> Gradients:
        """See ``CpuFlash.backward``."""
        dq, dk, dv = _whole(kept.query, kept.key, causal).backward(grad, kept, scale)
        return dq.float(), dk.float(), dv.float()


def _whole(query: Tensor, key: Tensor, causal: bool) -> _Call:
    """One run of all queries and one of all keys."""
    runs = _both([(0, len(query))], [(0, len(key))], query.device)
    return _Call(None, None, *runs, causal=causal)


def _rows(t: Tensor, at: Rows) -> Tensor:
    if isinstance(at, Tensor):
        return t.index_select(0, at)
    return (t if at is None else t[at]).contiguous()


def takes_flash3(query: Tensor) -> bool:
    """Whether flash attention's calls are FlashAttention 3's."""
    real = type(query) is Tensor  # and not simulated
    return real and flash3_problem(query.device, query.shape[-1]) is None


def takes_dense(query: Tensor) -> bool:
    """Whether cuDNN's kernel takes these queries, and is faster than flash attention 2."""
    return type(query) is Tensor and query.shape[-1] <= 128 and is_hopper(query.device)


class _Varlen(torch.autograd.Function):
    """Attention of rows to themselves, whose calls together compute every row once, merged with
    attention to rows above."""

    @staticmethod
    def forward(
        ctx: Any,
        own: Sequence[_Call | _Dense],
        above: Sequence[_Call],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        exact = query.dtype if sinks is None and not above else torch.float32
        out = torch.empty(0, dtype=exact)
        lse = torch.empty(0)
        for at, call in enumerate(own):
            part, part_lse = call.forward(query, key, value, scale)
            if call.queries is None:
                out = part.to(exact)
                lse = part_lse
                continue
            if not at:
                out = torch.empty(query.shape, dtype=exact, device=query.device)
                lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            out[call.queries] = part.to(exact)
            lse[call.queries] = part_lse
        for call in above:
            both = out[call.queries]
            both_lse = lse[call.queries]
            merge(both, both_lse, *call.forward(query, key, value, scale))
            out[call.queries] = both
            lse[call.queries] = both_lse
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.own = own
        ctx.above = above
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        *tensors, sinks = ctx.saved_tensors
        kept = Attended(*tensors)
        of_sinks = None if sinks is None else sinks_gradient(sinks, grad_out, kept.out, kept.lse)
        calls: list[_Call | _Dense] = [*ctx.own, *ctx.above]
        operands = (grad_out, kept, ctx.scale)
        if len(calls) == 1 and calls[0].keys is None:
            return None, None, *calls[0].backward(*operands), None, of_sinks
        grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in kept[:3]]
        for call in calls:
            for total, part, at in zip(
                grads, call.backward(*operands), (call.queries, call.keys, call.keys), strict=True
            ):
                if isinstance(at, Tensor):  # windows of siblings overlap in their ancestors' rows
                    total.index_add_(0, at, part.float())
                else:
                    total[slice(None) if at is None else at] += part
        return None, None, *(g.to(kept.query.dtype) for g in grads), None, of_sinks
