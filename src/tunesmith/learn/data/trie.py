"""The trie of the samples' prefixes: leading tokens without loss. No torch.

Two samples share the leading tokens that are equal and carry no loss in either. With samples sorted
by that prefix, one list describes the trie: how many tokens each sample shares with the previous
one. Their forest has ``sum(length) - sum(shared)`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tunesmith.learn.data.batch import Batch


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Samples sorted so that those with the longest common prefix are neighbours.

    ``order[r]`` is the index of the sample of rank ``r``; ``shared[r]`` is the number of leading
    tokens that it shares with rank ``r - 1`` (0 for the first). Ranks ``a < b`` share
    ``min(shared[a + 1 : b + 1])``.

    Example:
        ``[1, 2, 8]``, ``[5]`` and ``[1, 2, 9]`` with loss on their last tokens (of the first and
        third) have order ``[0, 2, 1]`` and shared ``[0, 2, 0]``: 3 + 1 + 1 tokens.
    """

    order: list[int]
    shared: list[int]


def prefix_order(
    batch: Batch, samples: Sequence[int] | None = None, *, share: bool = True
) -> PrefixOrder:
    """Sort samples of a batch (all by default) by their prefix; indices count within ``samples``.

    Without ``share`` nothing is shared, and the order stays.
    """
    chosen = range(batch.num_samples) if samples is None else samples
    count = len(chosen)
    if not share:
        return PrefixOrder(list(range(count)), [0] * count)
    starts = batch.offsets.tolist()
    sizes = batch.prefix_lengths.tolist()
    lengths = batch.lengths.tolist()
    stride = batch.stride
    prefixes = [
        batch.sortable[stride * starts[i] : stride * (starts[i] + sizes[i])] for i in chosen
    ]
    # Among equal prefixes, a sample that is all prefix goes first, directly before the samples that
    # continue it.
    longer = [lengths[i] > sizes[i] for i in chosen]
    order = sorted(range(count), key=lambda k: (prefixes[k], longer[k], k))
    shared = [common_length(prefixes[a], prefixes[b]) // stride for a, b in pairwise(order)]
    return PrefixOrder(order, [0, *shared][:count])


def num_forest_tokens(
    batch: Batch, samples: Sequence[int] | None = None, *, share: bool = True
) -> int:
    """Tokens of the forest built from samples of a batch."""
    lengths = batch.lengths if samples is None else batch.lengths[np.asarray(samples, np.int64)]
    return int(lengths.sum()) - sum(prefix_order(batch, samples, share=share).shared)


@dataclass(frozen=True, slots=True)
class Node:
    """Positions ``[start, stop)``, shared by several samples, after those of ``parent`` (-1 for a
    root)."""

    start: int
    stop: int
    parent: int


def build_nodes(lengths: Sequence[int], prefixes: PrefixOrder) -> tuple[list[Node], list[int]]:
    """The trie as nodes in pre-order, and for each sample the node of its last token.

    Args:
        lengths: tokens of each sample, in the order of the indices in ``prefixes``.
    """
    order = prefixes.order
    shared = prefixes.shared
    nodes: list[Node] = []
    last = [-1] * len(lengths)
    # Runs of ranks whose samples share the tokens placed so far: (first, past the last, placed
    # tokens, parent). A stack instead of recursion, because a trie can be deeper than Python's
    # limit.
    stack = [(0, len(order), 0, -1)] if order else []
    while stack:
        low, high, placed, parent = stack.pop()
        first = low
        while high - low > 1 and lengths[order[low]] == min(shared[low + 1 : high]):
            low += 1  # the others continue this sample, so it ends within their node
        common = min(shared[low + 1 : high], default=lengths[order[low]])
        if common > placed:
            nodes.append(Node(placed, common, parent))
            parent = len(nodes) - 1
        ending = low + 1 if high - low == 1 else low
        for index in order[first:ending]:
            last[index] = parent
        cuts = [ending, *(r for r in range(low + 1, high) if shared[r] == common), high]
        stack.extend((a, b, common, parent) for a, b in reversed(list(pairwise(cuts))) if a < b)
    return nodes, last


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of equal leading elements, by bisection on slices (compared in C)."""
    low = 0
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
