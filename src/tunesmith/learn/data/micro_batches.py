"""A batch as micro-batches: forests, laid out once per layout.

Scoring and every pass of an update use the same ``Packing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tunesmith.costs import CostModel
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.packing import pack
from tunesmith.learn.data.trie import build_nodes, prefix_order
from tunesmith.models.forest import Forest, Segment


def build_forest(
    batch: Batch, samples: Sequence[int] | None = None, *, share: bool = True
) -> Forest:
    """Lay out samples of a batch (all by default) as one forest, without the batch's columns.

    A prefix shared by several samples is placed once. Predictions are in the order of ``samples``.

    Example:
        Prompt ``[5, 6]`` with completions ``[7, 2]`` and ``[8]`` gives tokens ``5 6 7 2 8``,
        segments ``(0, 2, -1) (2, 2, 0) (4, 1, 0)``, source ``1 2 1`` and targets ``7 2 8``.
    """
    chosen = np.arange(batch.num_samples) if samples is None else np.array(samples, np.int64)
    picked = batch.take(chosen)
    lengths = picked.lengths.tolist()
    offsets = picked.offsets.tolist()
    nodes, last = build_nodes(lengths, prefix_order(picked, share=share))
    starts = list(accumulate((n.stop - n.start for n in nodes), initial=0))
    rows = np.empty(picked.num_tokens, np.int64)  # each token's row in the forest
    for offset, stop, end in zip(offsets, lengths, last, strict=False):
        while end >= 0:
            node = nodes[end]
            rows[offset + node.start : offset + stop] = np.arange(stop - node.start) + starts[end]
            stop = node.start
            end = node.parent
    token_ids = np.empty(starts[-1], np.int64)
    position_ids = np.empty(starts[-1], np.int64)
    token_ids[rows] = picked.token_ids
    firsts = np.repeat(picked.offsets[:-1], picked.lengths)
    position_ids[rows] = np.arange(picked.num_tokens) - firsts
    experts: torch.Tensor | None = None
    if picked.experts is not None:
        experts = torch.full((starts[-1], picked.experts.shape[1]), -1, dtype=torch.int16)
        experts[torch.from_numpy(rows)] = torch.from_numpy(picked.experts)
    return Forest(
        torch.from_numpy(token_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(np.bincount(rows, minlength=starts[-1])),
        tuple(Segment(a, n.stop - n.start, n.parent) for a, n in zip(starts, nodes, strict=False)),
        source=torch.from_numpy(rows[picked.predicted - 1]),
        targets=torch.from_numpy(picked.token_ids[picked.predicted]),
        sample=torch.from_numpy(picked.sample),
        predictions=torch.from_numpy(batch.predictions_of(chosen)),
        ends=torch.from_numpy(rows[picked.offsets[1:] - 1]),
        group=torch.from_numpy(picked.group),
        sample_ids=tuple(chosen.tolist()),
        lengths=tuple((picked.lengths - picked.stand_ins).tolist()),
        experts=experts,
    )


def gather(forest: Forest, batch: Batch) -> Forest:
    """The forest with the batch's columns in float32, or in float64 if that is torch's default
    dtype."""
    double = torch.get_default_dtype() == torch.float64

    def chosen(columns: Mapping[str, Floats], places: Any) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(values[places]) for name, values in columns.items()}
        return tensors if double else {name: tensor.float() for name, tensor in tensors.items()}

    return replace(
        forest,
        columns=chosen(batch.columns, forest.predictions.numpy()),
        per_sample=chosen(batch.per_sample, list(forest.sample_ids)),
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """A batch as micro-batches; iteration yields each with the batch's current columns."""

    forests: tuple[Forest, ...]
    num_predictions: int
    """The length of an array of scores, which ``Forest.predictions`` index."""
    batch: Batch | None = None
    """The source of the columns; None if the forests already have them."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        max_tokens: int,
        *,
        share: bool = True,
        keep_groups: bool = False,
        multiple_of: int = 1,
        cost: CostModel | None = None,
    ) -> Packing:
        """Pack a batch with ``packing.pack`` and lay out its forests; the batch caches the packing
        of each layout.

        ``cost`` only balances micro-batches: a cached packing is returned for any cost.
        """
        layout: dict[str, Any] = {"share": share, "keep_groups": keep_groups}
        layout["multiple_of"] = multiple_of
        key = (max_tokens, *layout.values())
        if key not in batch.packings:
            bins = pack(batch, max_tokens, cost=cost, **layout)
            forests = tuple(build_forest(batch, samples, share=share) for samples in bins)
            batch.packings[key] = cls(forests, batch.num_predictions, batch)
        return batch.packings[key]

    def __len__(self) -> int:
        return len(self.forests)

    def __iter__(self) -> Iterator[Forest]:
        for forest in self.forests:
            yield forest if self.batch is None else gather(forest, self.batch)

    @property
    def num_tokens(self) -> int:
        return sum(forest.num_tokens for forest in self.forests)

    def without_experts(self) -> Packing:
        """For passes whose routers are free."""
        return replace(self, forests=tuple(replace(f, experts=None) for f in self.forests))

    def with_ends(self) -> Packing:
        """For scoring: one extra prediction per sample after its last token; these follow the
        batch's predictions."""
        assert self.batch is not None
        first = self.num_predictions
        forests = tuple(forest.with_ends(first) for forest in self.forests)
        return Packing(forests, first + self.batch.num_samples)

    def for_rank(self, rank: int, world: int, *, columns: bool = True) -> Packing:
        """The micro-batches of one of ``world`` ranks, without a reference to the batch.

        Every rank gets the same number, with padding where needed, so that ranks stay in step.

        Args:
            columns: whether the forests have the batch's columns; scoring does not read them.
        """
        padding = [forest.padding() for forest in self.forests[:1] if rank >= len(self) % world > 0]
        forests = (*self.forests[rank::world], *padding)
        if columns and self.batch is not None:
            forests = tuple(gather(forest, self.batch) for forest in forests)
        return Packing(forests, self.num_predictions)
