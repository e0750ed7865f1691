"""The token forest: one layout for every batch, no padding.

A forest is a flat run of tokens and a short table of segments. A token attends to its own segment
up to itself, and to every ancestor segment in full. Plain packing is a forest of roots; a prompt
shared by a group of completions is a root with children.

Segments are in pre-order, so the descendants of a segment are one contiguous run directly after it.
Attention over a forest is one causal part per segment, and one full part (descendants see the
segment) per segment with children.

Shape legend: ``T`` tokens, ``N`` predictions (loss tokens), ``S`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tunesmith.costs import CostModel

T = TypeVar("T")


class Segment(NamedTuple):
    """Tokens ``[start, start + length)``; ``parent`` indexes the segment table, -1 for a root."""

    start: int
    length: int
    parent: int


@dataclass(frozen=True, slots=True)
class Forest:
    """A micro-batch.

    ``source[n]`` is the row whose hidden state predicts ``targets[n]``: the token before it in its
    sample, which may be the last token of the parent segment (the end of a prompt predicts the
    first token of every completion). ``sample[n]`` is the sample's index within the forest.
    ``sample_ids[s]`` and ``predictions[n]`` index the batch; ``data.micro_batches.gather`` adds its
    columns.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    copies: Tensor  # [T] int64, how many samples have each token; 0 for a filler
    segments: tuple[Segment, ...]
    source: Tensor  # [N] int64
    targets: Tensor  # [N] int64
    sample: Tensor  # [N] int64
    predictions: Tensor  # [N] int64
    ends: Tensor  # [S] int64, the row of each sample's last token
    group: Tensor  # [S] int64
    sample_ids: tuple[int, ...]  # S
    lengths: tuple[int, ...]  # S, tokens of each sample
    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # each [N, ...] float
    per_sample: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # each [S] float
    experts: Tensor | None = None  # [T, ...] int16, those to choose again; -1: routers are free
    rotary_lengths: tuple[int, ...] = ()
    """Per token, the sequence length that determines its rotary frequencies (``models.rope``);
    empty: none does."""
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

        def there(values: Mapping[str, Any]) -> dict[str, Any]:
            tensors = {name: t for name, t in values.items() if isinstance(t, Tensor)}
            return {name: t.to(device, non_blocking=True) for name, t in tensors.items()}

        return replace(
            self,
            **there({f.name: getattr(self, f.name) for f in fields(self)}),
            columns=there(self.columns),
            per_sample=there(self.per_sample),
            own=self.own and self.own.to(device),
        )

    def padding(self) -> Forest:
        """One token without predictions: the micro-batch of a rank that has none left while others
        have one."""
        one = torch.zeros(1, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        return Forest(
            one, one, one, (Segment(0, 1, -1),), none, none, none, none, none, none, (), (1,),
            {name: column[:0] for name, column in self.columns.items()},
            {name: column[:0] for name, column in self.per_sample.items()},
        )  # fmt: skip

    def part(self, rank: int, size: int) -> Forest:
        """Every ``size``-th token from index ``rank`` on, and the predictions made at these tokens.

        Each part thus has its share of prompts and completions. ``segments`` stay those of the
        whole forest, and ``predictions`` index the whole forest's. If ``size`` does not divide the
        tokens, a filler segment comes last.

        Example:
            Part 1 of 2 of ``build_forest``'s example: tokens ``6 2`` and the filler, source ``0
            0``, targets ``7 8``.
        """
        filling = torch.arange(-self.num_tokens % size)
        own = [Segment(self.num_tokens, len(filling), -1)] if len(filling) else []
        segments = (*self.segments, *own)
        lengths = (*self.rotary_lengths, *self.rotary_lengths[-1:] * len(filling))
        chosen = (self.source % size == rank).nonzero().squeeze(1)
        return replace(
            self,
            token_ids=_filled(self.token_ids, filling)[rank::size],
            position_ids=torch.cat([self.position_ids, filling])[rank::size],
            segments=segments,
            source=self.source[chosen] // size,
            targets=self.targets[chosen],
            sample=self.sample[chosen],
            predictions=chosen,
            columns={name: column[chosen] for name, column in self.columns.items()},
            per_sample={},
            copies=_filled(self.copies, filling)[rank::size],
            experts=None if self.experts is None else _filled(self.experts, filling)[rank::size],
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
            predictions=torch.cat(
                [self.predictions, first + torch.tensor(self.sample_ids, dtype=torch.int64)]
            ),
        )


def _filled(rows: Tensor, filling: Tensor) -> Tensor:
    """Args: filling: of the filler's length; its rows are 0."""
    return torch.cat([rows, rows.new_zeros(len(filling), *rows.shape[1:])])


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


class PackedLengths(tuple[int, ...]):
    """Lengths of packed sequences; what layers derive from them is derived once per pass."""

    @cached_property
    def _derived(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def derive(self, make: Callable[..., T], *args: Any) -> T:
        """``make(self, *args)``, the same object for all layers."""
        key = (make, *args)
        if key not in self._derived:
            self._derived[key] = make(self, *args)
        return self._derived[key]


class ForestLevel(NamedTuple):
    """Segments of the same depth, whose parents are all in the level above."""

    rows: Tensor
    """The segments' tokens, one segment after the other."""
    lengths: PackedLengths
    parents: Tensor
    """Each segment's parent, as an index into the level above; empty for roots."""


def levels(segments: Sequence[Segment], device: torch.device) -> list[ForestLevel]:
    """The segments from roots to leaves: for layers that continue from the end of the parent."""
    depths: list[int] = []
    for segment in segments:
        depths.append(depths[segment.parent] + 1 if segment.parent >= 0 else 0)
    found: list[ForestLevel] = []
    places: dict[int, int] = {}
    for depth in sorted(set(depths)):
        indices = [index for index, own in enumerate(depths) if own == depth]
        own = [segments[index] for index in indices]
        rows = [torch.arange(s.start, s.start + s.length, device=device) for s in own]
        parents = torch.tensor([places[s.parent] for s in own if depth], device=device).long()
        found.append(ForestLevel(torch.cat(rows), PackedLengths(s.length for s in own), parents))
        places.update({index: place for place, index in enumerate(indices)})
    return found


def within_chunks(segments: Sequence[Segment], chunk: int) -> tuple[list[Segment], list[int]]:
    """A forest in which a token sees only those of its own run of ``chunk`` positions, counted from
    the start of its sequence: segments are cut at the runs, and what starts one is a root.

    Returns:
        Its segments, and its rows in their order.
    """
    ends: list[int] = []  # tokens on the path of each segment
    last: list[int] = []  # the piece that a segment's children continue; -1: they start a run
    pieces: list[Segment] = []
    for start, length, parent in segments:
        before = ends[parent] if parent >= 0 else 0
        above = last[parent] if parent >= 0 else -1
        cuts = [*range(-before % chunk or chunk, length, chunk), length]
        for first, stop in pairwise([0, *cuts]):
            pieces.append(Segment(start + first, stop - first, above))
            above = -1
        ends.append(before + length)
        last.append(-1 if ends[-1] % chunk == 0 else len(pieces) - 1)
    return _in_pre_order(pieces)


def _in_pre_order(pieces: Sequence[Segment]) -> tuple[list[Segment], list[int]]:
    """Each tree's pieces after one another, and the rows in this order."""
    children: list[list[int]] = [[] for _ in pieces]
    roots: list[int] = []
    for index, piece in enumerate(pieces):
        (children[piece.parent] if piece.parent >= 0 else roots).append(index)
    ordered: list[Segment] = []
    rows: list[int] = []
    waiting = [(root, -1) for root in reversed(roots)]
    while waiting:
        index, parent = waiting.pop()
        start, length, _ = pieces[index]
        waiting += [(child, len(ordered)) for child in reversed(children[index])]
        ordered.append(Segment(len(rows), length, parent))
        rows += range(start, start + length)
    return ordered, rows


def subtree_ends(segments: Sequence[Segment]) -> list[int]:
    """The end of each segment's run of descendants; the segment's own end if it has none."""
    stops = [s.start + s.length for s in segments]
    for i in range(len(segments) - 1, -1, -1):
        parent = segments[i].parent
        if parent >= 0:
            stops[parent] = max(stops[parent], stops[i])
    return stops


def forest_cost(forest: Forest, cost: CostModel) -> float:
    """The operations of a forest without recomputation: tokens, causal pairs with all ancestors,
    and predictions."""
    depth = [0] * len(forest.segments)
    pairs = 0
    for index, (_, length, parent) in enumerate(forest.segments):
        before = depth[parent] if parent >= 0 else 0
        depth[index] = before + length
        pairs += length * before + length * (length + 1) // 2
    head = cost.head * forest.targets.numel()
    return cost.linear * forest.num_tokens + cost.quadratic * pairs + head
