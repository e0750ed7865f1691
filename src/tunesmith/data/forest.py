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

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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
    Predictions of one sample are consecutive and in order; ``sample[n]`` numbers the sample within the
    forest and ``sample_ids[s]`` is its index in the list the forest was planted from.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    source: Tensor  # [N] int64
    targets: Tensor  # [N] int64
    sample: Tensor  # [N] int64
    sample_ids: tuple[int, ...]  # S
    columns: dict[str, Tensor]  # each [N] float

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> Forest:
        """The same forest with its tensors on ``device``."""
        move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
        return Forest(
            move(self.token_ids),
            move(self.position_ids),
            self.segments,
            move(self.source),
            move(self.targets),
            move(self.sample),
            self.sample_ids,
            {name: move(column) for name, column in self.columns.items()},
        )
