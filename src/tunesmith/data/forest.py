"""The token forest: one layout for every batch, no padding.

A forest is a flat run of tokens and a short table of segments. A token attends to its own segment up to
itself and to the whole of every ancestor segment. Plain packing is a forest of roots; a prompt shared by a
group of completions is a root with children.

Segments stand in pre-order, so everything that descends from a segment is one contiguous run right after
it. Attention over a whole forest is then one causal piece per segment, plus one full piece (descendants
see the segment) per segment that has children.

Shape legend: ``T`` tokens, ``N`` predictions (loss tokens), ``S`` samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.data.trie import Node, build_nodes, prefix_order
from tunesmith.plan.cost import CostModel
from tunesmith.types import Sample


class Segment(NamedTuple):
    """Tokens ``[start, start + length)``; ``parent`` indexes the segment table, -1 for a root."""

    start: int
    length: int
    parent: int


@dataclass(frozen=True, slots=True)
class Forest:
    """A micro-batch.

    ``source[n]`` is the row whose hidden state predicts ``targets[n]``: the token before it in its sample,
    which may be the last token of the parent segment (one prompt end predicts every sibling's first token).
    Of a sample that ``goes_on`` the last row predicts, too; its target and columns stand in and mean nothing.
    Predictions of one sample are consecutive and in order; ``sample[n]`` numbers the sample within the
    forest and ``sample_ids[s]`` is its index in the list the forest was built from.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    source: Tensor  # [N] int64
    targets: Tensor  # [N] int64
    sample: Tensor  # [N] int64
    sample_ids: tuple[int, ...]  # S
    lengths: tuple[int, ...]  # S, tokens of each sample
    columns: dict[str, Tensor]  # each [N] float

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> Forest:
        """The same forest with its tensors on ``device``."""
        names = ("token_ids", "position_ids", "source", "targets", "sample")
        moved: dict[str, Any] = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        columns = {name: column.to(device, non_blocking=True) for name, column in self.columns.items()}
        return replace(self, **moved, columns=columns)


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says at a forest's predictions, all ``[N]``; each model fills in what it has.

    A language model gives ``logprobs`` of the targets and, when asked, the ``entropy`` of the distributions they
    are drawn from; a critic or a reward model gives ``values``, a scalar at each source row.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    divergence: Tensor | None = None
    """Of a student: KL(teacher ‖ student), in nats."""


def build_forest(samples: Sequence[Sample], indices: Sequence[int] | None = None, *, share: bool = True) -> Forest:
    """Lay out ``samples[i] for i in indices`` (all of them by default) as one forest.

    Leading tokens that carry no loss in any of the samples that have them are placed once. Predictions come
    in the order of ``indices``. Columns become float32, or float64 where that is torch's default dtype.

    Example:
        Prompt ``[5, 6]`` with completions ``[7, 2]`` and ``[8]`` gives tokens ``5 6 7 2 8``, segments
        ``(0, 2, -1) (2, 2, 0) (4, 1, 0)``, source ``1 2 1`` and targets ``7 2 8``.
    """
    chosen = tuple(range(len(samples)) if indices is None else indices)
    picked = [samples[i] for i in chosen]
    for sample in picked:
        _check(sample, picked[0])
    lengths = [len(sample.token_ids) for sample in picked]
    nodes, last = build_nodes(lengths, prefix_order(picked, share=share))
    starts = list(accumulate((n.stop - n.start for n in nodes), initial=0))[:-1]
    token_ids = [t for n in nodes for t in picked[n.sample].token_ids[n.start : n.stop]]
    positions = [np.arange(n.start, n.stop, dtype=np.int64) for n in nodes]

    rows = [_rows(length, end, nodes, starts) for length, end in zip(lengths, last, strict=True)]
    predicted = [np.flatnonzero([*sample.loss_mask, sample.goes_on]) for sample in picked]
    source = [path[at - 1] for path, at in zip(rows, predicted, strict=True)]
    targets = [_at(s.token_ids, at, np.int64) for s, at in zip(picked, predicted, strict=True)]
    numbers = [np.full(len(at), s, dtype=np.int64) for s, at in enumerate(predicted)]
    width = np.float64 if torch.get_default_dtype() == torch.float64 else np.float32
    names = picked[0].columns if picked else ()
    return Forest(
        torch.tensor(token_ids, dtype=torch.int64),
        _flat(positions, np.int64),
        tuple(Segment(a, n.stop - n.start, n.parent) for a, n in zip(starts, nodes, strict=True)),
        _flat(source, np.int64),
        _flat(targets, np.int64),
        _flat(numbers, np.int64),
        chosen,
        tuple(len(sample.token_ids) - sample.stand_ins for sample in picked),
        {
            name: _flat([_at(s.columns[name], at, width) for s, at in zip(picked, predicted, strict=True)], width)
            for name in names
        },
    )


def _check(sample: Sample, first: Sample) -> None:
    length = len(sample.token_ids)
    assert length > 0, "a sample needs at least one token"
    assert len(sample.loss_mask) == length, "loss_mask is not as long as token_ids"
    assert not sample.loss_mask[0], "nothing predicts the first token: it cannot carry loss"
    assert sample.columns.keys() == first.columns.keys(), "samples of one forest have the same columns"
    assert all(len(column) == length for column in sample.columns.values()), "a column is not as long as token_ids"


def _rows(length: int, end: int, nodes: Sequence[Node], starts: Sequence[int]) -> NDArray[np.int64]:
    """Row of each token of a sample that ends in node ``end``: its path from there up to the root."""
    rows = np.empty(length, dtype=np.int64)
    stop = length
    while end >= 0:
        node = nodes[end]
        rows[node.start : stop] = np.arange(starts[end], starts[end] + stop - node.start)
        stop, end = node.start, node.parent
    return rows


def _at(values: Sequence[float], at: NDArray[np.intp], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.asarray(values, dtype=dtype)[np.minimum(at, len(values) - 1)]


def _flat(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=dtype))


def subtree_ends(segments: Sequence[Segment]) -> list[int]:
    """Where each segment's descendants, which stand right behind it, end; its own end where it has none."""
    stops = [s.start + s.length for s in segments]
    for i in range(len(segments) - 1, -1, -1):
        if (parent := segments[i].parent) >= 0:
            stops[parent] = max(stops[parent], stops[i])
    return stops


def forest_cost(forest: Forest, cost: CostModel) -> float:
    """The work in a forest: tokens, causal pairs (with all ancestors), predictions. Recompute is not work."""
    depth = [0] * len(forest.segments)
    pairs = 0
    for index, (_, length, parent) in enumerate(forest.segments):
        before = depth[parent] if parent >= 0 else 0
        depth[index] = before + length
        pairs += length * before + length * (length + 1) // 2
    return cost.linear * forest.num_tokens + cost.quadratic * pairs + cost.head * forest.targets.numel()
