"""The token forest: one layout for every batch, no padding.

A forest is a flat run of tokens and a short table of segments. A token attends to its own segment up to itself, and to
every ancestor segment in full. Plain packing is a forest of roots; a prompt shared by a group of completions is a root
with children.

Segments are in pre-order, so the descendants of a segment are one contiguous run directly after it. Attention over a
forest is one causal part per segment, and one full part (descendants see the segment) per segment with children.

A batch is packed into micro-batches once per layout. Scoring and every pass of an update use the same ``Packing``.

Shape legend: ``T`` tokens, ``N`` predictions (loss tokens), ``S`` samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tunesmith.data.batch import Batch
from tunesmith.data.packing import pack
from tunesmith.data.trie import build_nodes, prefix_order
from tunesmith.plan.cost.operations import CostModel


class Segment(NamedTuple):
    """Tokens ``[start, start + length)``; ``parent`` indexes the segment table, -1 for a root."""

    start: int
    length: int
    parent: int


@dataclass(frozen=True, slots=True)
class Forest:
    """A micro-batch.

    ``source[n]`` is the row whose hidden state predicts ``targets[n]``: the token before it in its sample, which may be
    the last token of the parent segment (the end of a prompt predicts the first token of every completion).
    ``sample[n]`` is the sample's index within the forest. ``sample_ids[s]`` and ``predictions[n]`` index the batch;
    ``gather`` adds its columns.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    source: Tensor  # [N] int64
    targets: Tensor  # [N] int64
    sample: Tensor  # [N] int64
    predictions: Tensor  # [N] int64
    ends: Tensor  # [S] int64, the row of each sample's last token
    group: Tensor  # [S] int64
    sample_ids: tuple[int, ...]  # S
    lengths: tuple[int, ...]  # S, tokens of each sample
    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # each [N] float
    per_sample: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # each [S] float
    rotary_lengths: tuple[int, ...] = ()
    """Per token, the sequence length that determines its rotary frequencies (``models.rope``); empty: none does."""
    own: Forest | None = None
    """The part of the forest that this rank of a sequence group computes; None: all."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> Forest:
        """The same forest with its tensors on ``device``."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        own = {f.name: moved(value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        columns = {name: moved(column) for name, column in self.columns.items()}
        per_sample = {name: moved(column) for name, column in self.per_sample.items()}
        part = None if self.own is None else self.own.to(device)
        return replace(self, **cast(Any, own), columns=columns, per_sample=per_sample, own=part)

    def gather(self, batch: Batch) -> Forest:
        """The forest with the batch's columns in float32, or in float64 if that is torch's default dtype."""
        rows, samples = self.predictions.numpy(), list(self.sample_ids)
        dtype = torch.get_default_dtype() if torch.get_default_dtype() == torch.float64 else torch.float32
        return replace(
            self,
            columns={name: torch.from_numpy(c[rows]).to(dtype) for name, c in batch.columns.items()},
            per_sample={name: torch.from_numpy(c[samples]).to(dtype) for name, c in batch.per_sample.items()},
        )

    def padding(self) -> Forest:
        """One token without predictions: the micro-batch of a rank that has none left while others have one."""
        one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        return Forest(
            one, one, (Segment(0, 1, -1),), none, none, none, none, none, none, (), (1,),
            {name: column[:0] for name, column in self.columns.items()},
            {name: column[:0] for name, column in self.per_sample.items()},
        )  # fmt: skip

    def part(self, rank: int, size: int) -> Forest:
        """Every ``size``-th token from index ``rank`` on, and the predictions made at these tokens.

        Each part thus has its share of prompts and completions. ``segments`` stay those of the whole forest, and
        ``predictions`` index the whole forest's. If ``size`` does not divide the tokens, a filler segment comes last.

        Example:
            Part 1 of 2 of ``build_forest``'s example: tokens ``6 2`` and the filler, source ``0 0``, targets ``7 8``.
        """
        filling = torch.arange(-self.num_tokens % size)
        segments = (*self.segments, Segment(self.num_tokens, len(filling), -1)) if len(filling) else self.segments
        lengths = (*self.rotary_lengths, *self.rotary_lengths[-1:] * len(filling))
        chosen = (self.source % size == rank).nonzero().squeeze(1)
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, torch.zeros_like(filling)])[rank::size],
            position_ids=torch.cat([self.position_ids, filling])[rank::size],
            segments=segments,
            source=self.source[chosen] // size,
            targets=self.targets[chosen],
            sample=self.sample[chosen],
            predictions=chosen,
            columns={},
            per_sample={},
            rotary_lengths=lengths[rank::size],
        )

    def with_ends(self, first: int) -> Forest:
        """A forest for scoring, with one extra prediction per sample, after its last token.

        Args:
            first: the index of the first sample's extra prediction in the array of scores.
        """
        return replace(
            self,
            source=torch.cat([self.source, self.ends]),
            targets=torch.cat([self.targets, self.token_ids[self.ends]]),
            sample=torch.cat([self.sample, torch.arange(self.num_samples)]),
            predictions=torch.cat([self.predictions, first + torch.tensor(self.sample_ids, dtype=torch.int64)]),
        )


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's outputs at a forest's predictions, all ``[N]``."""

    logprobs: Tensor | None = None
    """A language model's log-probabilities of the targets."""
    entropy: Tensor | None = None
    """The entropies of the targets' distributions."""
    values: Tensor | None = None
    """A critic's or reward model's scalars at the source rows."""
    divergence: Tensor | None = None
    """A student's KL(teacher ‖ student), in nats."""


def build_forest(batch: Batch, samples: Sequence[int] | None = None, *, share: bool = True) -> Forest:
    """Lay out samples of a batch (all by default) as one forest, without the batch's columns.

    A prefix shared by several samples is placed once. Predictions are in the order of ``samples``.

    Example:
        Prompt ``[5, 6]`` with completions ``[7, 2]`` and ``[8]`` gives tokens ``5 6 7 2 8``, segments
        ``(0, 2, -1) (2, 2, 0) (4, 1, 0)``, source ``1 2 1`` and targets ``7 2 8``.
    """
    chosen = np.arange(batch.num_samples) if samples is None else np.array(samples, np.int64)
    picked = batch.take(chosen)
    lengths, offsets = picked.lengths.tolist(), picked.offsets.tolist()
    nodes, last = build_nodes(lengths, prefix_order(picked, share=share))
    starts = list(accumulate((n.stop - n.start for n in nodes), initial=0))
    rows = np.empty(picked.num_tokens, np.int64)  # each token's row in the forest
    for offset, stop, end in zip(offsets, lengths, last, strict=False):
        while end >= 0:
            node = nodes[end]
            rows[offset + node.start : offset + stop] = np.arange(starts[end], starts[end] + stop - node.start)
            stop, end = node.start, node.parent
    token_ids, position_ids = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
    token_ids[rows] = picked.token_ids
    position_ids[rows] = np.arange(picked.num_tokens) - np.repeat(picked.offsets[:-1], picked.lengths)
    return Forest(
        torch.from_numpy(token_ids),
        torch.from_numpy(position_ids),
        tuple(Segment(a, n.stop - n.start, n.parent) for a, n in zip(starts, nodes, strict=False)),
        source=torch.from_numpy(rows[picked.predicted - 1]),
        targets=torch.from_numpy(picked.token_ids[picked.predicted]),
        sample=torch.from_numpy(picked.sample),
        predictions=torch.from_numpy(batch.predictions_of(chosen)),
        ends=torch.from_numpy(rows[picked.offsets[1:] - 1]),
        group=torch.from_numpy(picked.group),
        sample_ids=tuple(chosen.tolist()),
        lengths=tuple((picked.lengths - picked.stand_ins).tolist()),
    )


def subtree_ends(segments: Sequence[Segment]) -> list[int]:
    """The end of each segment's run of descendants; the segment's own end if it has none."""
    stops = [s.start + s.length for s in segments]
    for i in range(len(segments) - 1, -1, -1):
        if (parent := segments[i].parent) >= 0:
            stops[parent] = max(stops[parent], stops[i])
    return stops


def forest_cost(forest: Forest, cost: CostModel) -> float:
    """The operations of a forest without recomputation: tokens, causal pairs with all ancestors, and predictions."""
    depth = [0] * len(forest.segments)
    pairs = 0
    for index, (_, length, parent) in enumerate(forest.segments):
        before = depth[parent] if parent >= 0 else 0
        depth[index] = before + length
        pairs += length * before + length * (length + 1) // 2
    return cost.linear * forest.num_tokens + cost.quadratic * pairs + cost.head * forest.targets.numel()


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
        """Pack a batch with ``packing.pack`` and lay out its forests; the batch caches the packing of each layout.

        ``cost`` only balances micro-batches: a cached packing is returned for any cost.
        """
        layout = (max_tokens, share, keep_groups, multiple_of)
        if layout not in batch.packings:
            bins = pack(batch, max_tokens, share=share, keep_groups=keep_groups, multiple_of=multiple_of, cost=cost)
            forests = tuple(build_forest(batch, samples, share=share) for samples in bins)
            batch.packings[layout] = cls(forests, batch.num_predictions, batch)
        return batch.packings[layout]

    def __len__(self) -> int:
        return len(self.forests)

    def __iter__(self) -> Iterator[Forest]:
        return iter(self.forests) if self.batch is None else (forest.gather(self.batch) for forest in self.forests)

    @property
    def num_tokens(self) -> int:
        return sum(forest.num_tokens for forest in self.forests)

    def with_ends(self) -> Packing:
        """For scoring: one extra prediction per sample after its last token; these follow the batch's predictions."""
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
            forests = tuple(forest.gather(self.batch) for forest in forests)
        return Packing(forests, self.num_predictions)
