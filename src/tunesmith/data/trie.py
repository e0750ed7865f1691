"""What samples share: the trie of their leading tokens that carry no loss. No torch.

Two samples share a prefix as far as their tokens are equal and neither has a loss token in it. Sorted by
that prefix, the whole trie is one list: how much each sample shares with the one before it. Everything about
a set of samples adds up over it: ``tokens = sum(length) - sum(shared)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tunesmith.data.batch import Batch


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Samples sorted so that those sharing most are neighbours.

    ``order[r]`` is the place, among the samples given, of the sample of rank ``r``; ``shared[r]`` counts the leading
    tokens it has in common with rank ``r - 1`` (0 for the first). Ranks ``a < b`` share
    ``min(shared[a + 1 : b + 1])``.

    Example:
        ``[1, 2, 8]``, ``[5]`` and ``[1, 2, 9]`` with loss on their last tokens (of the first and third) have
        order ``[0, 2, 1]`` and shared ``[0, 2, 0]``: 3 + 1 + 1 tokens.
    """

    order: list[int]
    shared: list[int]


def prefix_order(batch: Batch, samples: Sequence[int] | None = None, *, share: bool = True) -> PrefixOrder:
    """Sort samples of a batch (all by default) by the prefix they may share.

    ``share=False`` shares nothing and keeps the order.
    """
    chosen = range(batch.num_samples) if samples is None else samples
    count = len(chosen)
    if not share:
        return PrefixOrder(list(range(count)), [0] * count)
    starts, sizes, lengths = batch.offsets.tolist(), batch.prefix_lengths.tolist(), batch.lengths.tolist()
    prefixes = [batch.sortable[4 * starts[i] : 4 * (starts[i] + sizes[i])] for i in chosen]
    # Of equal prefixes, one that is a whole sample goes first, so that what continues it comes right after.
    order = sorted(range(count), key=lambda k: (prefixes[k], lengths[chosen[k]] > sizes[chosen[k]], k))
    pairs = pairwise(order)
    return PrefixOrder(order, [0][:count] + [common_length(prefixes[a], prefixes[b]) // 4 for a, b in pairs])


def num_forest_tokens(batch: Batch, samples: Sequence[int] | None = None, *, share: bool = True) -> int:
    """Tokens of the forest built from samples of a batch."""
    lengths = batch.lengths if samples is None else batch.lengths[np.asarray(samples, np.int64)]
    return int(lengths.sum()) - sum(prefix_order(batch, samples, share=share).shared)


@dataclass(frozen=True, slots=True)
class Node:
    """One segment: tokens ``[start, stop)`` of sample ``sample``, after those of ``parent`` (-1 for a root)."""

    sample: int
    start: int
    stop: int
    parent: int


def build_nodes(lengths: Sequence[int], prefixes: PrefixOrder) -> tuple[list[Node], list[int]]:
    """The trie as nodes in pre-order, and for each sample the node that holds its last token.

    Args:
        lengths: tokens of each sample, by its place in the list that ``prefixes`` was made of.
    """
    ranks, shared = _without_prefixes(lengths, prefixes)
    nodes: list[Node] = []
    last = [-1] * len(lengths)
    # (first rank, past the last rank, tokens already placed, parent): the samples of these ranks have all of
    # those tokens in common. A stack, since a trie may be deeper than Python's.
    stack = [(0, len(ranks), 0, -1)] if ranks else []
    while stack:
        low, high, placed, parent = stack.pop()
        first = prefixes.order[ranks[low]]
        common = min(shared[low + 1 : high], default=lengths[first])
        if common > placed:
            nodes.append(Node(first, placed, common, parent))
            parent = len(nodes) - 1
        if high - low == 1:
            last[first] = parent
            continue
        cuts = [low, *(r for r in range(low + 1, high) if shared[r] == common), high]
        stack.extend((a, b, common, parent) for a, b in reversed(list(pairwise(cuts))))
    _place_prefixes(lengths, prefixes, ranks, nodes, last)
    return nodes, last


def _without_prefixes(lengths: Sequence[int], prefixes: PrefixOrder) -> tuple[list[int], list[int]]:
    """The ranks that need a node of their own: those that the next rank does not continue; and what they share."""
    ranks: list[int] = []
    shared: list[int] = []
    least = 0
    for rank, index in enumerate(prefixes.order):
        least = min(least, prefixes.shared[rank])
        following = prefixes.shared[rank + 1] if rank + 1 < len(prefixes.order) else -1
        if following == lengths[index]:
            continue
        ranks.append(rank)
        shared.append(least)
        least = following
    return ranks, shared


def _place_prefixes(
    lengths: Sequence[int], prefixes: PrefixOrder, ranks: list[int], nodes: list[Node], last: list[int]
) -> None:
    """Find, for each sample that another continues, the node where it ends."""
    own = set(ranks)
    following = -1
    for rank in reversed(range(len(prefixes.order))):
        index = prefixes.order[rank]
        if rank in own:
            following = last[index]
            continue
        node = following
        while nodes[node].start >= lengths[index]:
            node = nodes[node].parent
        last[index] = node


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning, by bisection on slices (compared in C)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
