"""Trees of segments, and attention on them as plain matrices."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tunesmith.models.forest import Segment

TREE = (  # three deep, with segments of one token, two trees
    Segment(0, 5, -1),
    Segment(5, 3, 0),
    Segment(8, 1, 1),
    Segment(9, 40, 1),
    Segment(49, 1, 0),
    Segment(50, 7, -1),
    Segment(57, 1, -1),
)


def visible(segments: tuple[Segment, ...], window: int | None = None) -> Tensor:
    """``[T, T]``: which row sees which, spelled out row by row."""
    total = sum(s.length for s in segments)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for i, segment in enumerate(segments):
        path: list[int] = []
        at = i
        while at >= 0:
            path = [*range(segments[at].start, segments[at].start + segments[at].length), *path]
            at = segments[at].parent
        for place in range(len(path) - segment.length, len(path)):
            first = 0 if window is None else max(0, place - window + 1)
            mask[path[place], path[first : place + 1]] = True
    return mask


def reference(
    mask: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hts,shd->thd", weights, value)


def tensors(
    total: int, heads: int, kv_heads: int, dtype: torch.dtype, dim: int = 16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(total, h, dim, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads)
    ]
    return [t.to(dtype).requires_grad_() for t in made]


def difference(a: Tensor, b: Tensor) -> float:
    a = a.detach().double()
    b = b.detach()
    return float((a - b).norm() / max(float(b.norm()), 1.0))


@st.composite
def forests(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Any table in pre-order: each next parent is the last segment or one of its ancestors, or
    none."""
    segments: list[Segment] = []
    for _ in range(draw(st.integers(1, 8))):
        path = [-1]
        at = len(segments) - 1
        while at >= 0:
            path.append(at)
            at = segments[at].parent
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(Segment(start, draw(st.integers(1, 6)), draw(st.sampled_from(path))))
    return tuple(segments)
