"""Forest attention on CUDA for models with soft caps: FlexAttention (arXiv:2412.05496).

PyTorch compiles a model's attention rule into one kernel. It computes only blocks of rows and
columns in which some row sees a column, and skips the mask where every row sees every column.

Shape legend: ``T`` tokens, ``B`` blocks of tokens, ``H`` query heads, ``K`` key/value heads, ``D``
head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from torch.utils._triton import has_triton

from tunesmith.models.forest import Segment, subtree_ends
from tunesmith.models.kernels.attention import AttentionRule, on_gpu
from tunesmith.models.kernels.inductor import keep_inductors_cache

BLOCK = 128
"""Tokens per block; the kernel's default."""
LEAST_HEAD = 16
MOST_HEAD = 256
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a row sees a column: a function of batch, head, row and column."""


class CudaFlex:
    """A kernel of ``ForestAttention`` for 16-bit tensors, without sinks."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.stops, self.positions = (t.to(device, non_blocking=True) for t in rows_of(segments))
        self.segments = segments
        self.device = device
        self.masks: dict[int | None, BlockMask] = {}
        self.changes: dict[float, Callable[..., Tensor]] = {}

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:
        dim = query.shape[-1]
        fits = on_gpu(query) and LEAST_HEAD <= dim <= MOST_HEAD and dim % 8 == 0
        return fits and rule.sinks is None and (has_triton() or not torch.cuda.is_available())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        rows = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        options = {"enable_gqa": query.shape[1] != key.shape[1], "scale": rule.scale}
        out = kernel()(
            *rows, score_mod=self.change(rule.softcap), block_mask=self.mask(rule.window), **options
        )
        return out[0].transpose(0, 1)

    def change(self, softcap: float | None) -> Callable[..., Tensor] | None:
        """The score modification, made once for all layers with this soft cap."""
        if softcap is not None and softcap not in self.changes:
            self.changes[softcap] = capped(torch.tensor(softcap).to(self.device, non_blocking=True))
        return None if softcap is None else self.changes[softcap]

    def mask(self, window: int | None) -> BlockMask:
        """The block mask, made once for all layers with this window."""
        if window not in self.masks:
            some, whole = seen_blocks(self.segments, window)
            columns = (*_listed(some, self.device), *_listed(whole, self.device))
            self.masks[window] = BlockMask.from_kv_blocks(
                *columns,
                BLOCK_SIZE=BLOCK,
                mask_mod=sees(self.stops, self.positions, window),
                seq_lengths=(len(self.stops), len(self.stops)),
            )
        return self.masks[window]


@cache
def kernel() -> Any:
    """``flex_attention``, compiled once for any number of tokens."""
    if not torch.cuda.is_available():
        return counted
    keep_inductors_cache()
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def counted(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    """Uninitialized tensors of the sizes that ``flex_attention`` allocates, for devices that are
    not present."""
    return _Counted.apply(query, key, value)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        query, key, value, out, lse = ctx.saved_tensors
        assert grad.shape == out.shape
        _inner = torch.empty_like(lse)  # per row, the dot product of the output and its gradient
        return tuple(torch.empty_like(t) for t in (query, key, value))


def capped(cap: Tensor) -> Callable[..., Tensor]:
    """The score modification for a soft cap, a scalar tensor; the kernel cannot take a Python
    number as an input."""

    def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        del batch, head, row, column
        return cap * torch.tanh(score / cap)

    return change


def rows_of(segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """The end of the rows that see each token, and each token's position on its path: ``[T]`` int32
    each.

    Segments are in pre-order, so a token is seen by the rows from its own to the end of its
    segment's subtree.
    """
    stops = list[Tensor]()
    positions = list[Tensor]()
    ends = list[int]()
    for segment, stop in zip(segments, subtree_ends(segments), strict=True):
        start = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(start + segment.length)
        stops.append(torch.full((segment.length,), stop, dtype=torch.int32))
        positions.append(torch.arange(start, ends[-1], dtype=torch.int32))
    return torch.cat(stops), torch.cat(positions)


def sees(stops: Tensor, positions: Tensor, window: int | None) -> Mask:
    """The mask of a forest's segments and an optional window."""

    def in_forest(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        del batch, head
        return (column <= row) & (row < stops[column])

    if window is None:
        return in_forest

    def in_window(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return in_forest(batch, head, row, column) & (positions[row] - positions[column] < window)

    return in_window


def seen_blocks(segments: Sequence[Segment], window: int | None) -> tuple[Tensor, Tensor]:
    """Which blocks of rows and columns ``[B, B]`` are seen in part, and which in whole.

    With a window, blocks marked as seen in part may in fact be unseen.
    """
    stops, positions = rows_of(segments)
    last = torch.arange(len(stops)).split(BLOCK)
    first, last = (torch.stack([block[i] for block in last]) for i in (0, -1))
    least_stop, most_stop = _in_blocks(stops)
    some = (first[:, None] >= first) & (first[:, None] < most_stop)
    whole = (first[:, None] >= last) & (last[:, None] < least_stop)
    if window is not None:
        nearest, farthest = _in_blocks(positions)
        some &= nearest[:, None] - farthest < window
        whole &= farthest[:, None] - nearest < window
    return some & ~whole, whole


def _in_blocks(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each block, ``[B]``."""
    short = -len(numbers) % BLOCK
    blocks = pad(numbers[None].float(), (0, short), mode="replicate")[0].int().view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many column blocks each row block has, and which: ``[1, 1, B]`` and ``[1, 1, B, B]``
    int32."""
    counts = blocks.sum(1)
    which = torch.argsort(blocks.int(), stable=True, dim=1, descending=True)
    counts, which = (t.int()[None, None].to(device, non_blocking=True) for t in (counts, which))
    return counts, which
