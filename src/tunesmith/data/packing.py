"""Which samples go together into a micro-batch. No torch.

The token cap is hard. Below it: few micro-batches by best fit, siblings together so that their prompt is computed
once, then moves and swaps that make costs more equal, as ranks that wait for each other need. Everything is
deterministic.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from tunesmith.data.batch import Batch
from tunesmith.data.trie import PrefixOrder, num_forest_tokens, prefix_order
from tunesmith.errors import DataError
from tunesmith.plan.cost import CostModel

EXCHANGES = 200
"""Most moves and swaps made to equalise costs; each one lowers the highest."""
REPEATED = 1.001
"""How much dearer the whole may become, by prefixes repeated, for the sake of equal costs."""
RELATIVES = 4
"""Neighbours in the trie, to either side, whose bins a sample tries first."""


class SampleTooLong(DataError):
    """One sample alone is over the cap."""


class GroupTooLong(DataError):
    """Samples that have to share a micro-batch are over the cap together."""


def pack(
    batch: Batch,
    max_tokens: int,
    *,
    share: bool = True,
    cost: CostModel | None = None,
    keep_groups: bool = False,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Partition a batch's samples into micro-batches whose forests have at most ``max_tokens`` tokens.

    A tree that is over the cap is split with its prefix repeated.

    Args:
        keep_groups: samples of one ``group`` go into one micro-batch, as a loss that compares them needs.
        multiple_of: the number of ranks: micro-batches are a multiple of it where there are enough samples.

    Returns:
        Samples, ascending in each micro-batch; the costliest micro-batch first, so that one
        that does not fit in memory shows at once.

    Raises:
        SampleTooLong: one sample alone is over ``max_tokens``.
        GroupTooLong: a group that is to be kept together is.
    """
    for index in np.flatnonzero(batch.lengths > max_tokens)[:1].tolist():
        raise SampleTooLong(
            f"sample {index} has {batch.lengths[index]} tokens, more than a micro-batch may hold ({max_tokens}): "
            "raise system.max_tokens_per_microbatch or shorten the sample"
        )
    prefixes = prefix_order(batch, share=share)
    if keep_groups:
        prefixes = _grouped(batch, prefixes, share)
    weights = _Sizes(batch, prefixes, cost or CostModel(), keep_groups)
    bins = _best_fit(weights, _items(weights, max_tokens), max_tokens)
    if missing := -len(bins) % multiple_of:
        bins = _shared_out(weights, bins, len(bins) + missing, max_tokens)
    _equalise(weights, bins, max_tokens)
    bins.sort(key=lambda b: (-b.cost, b.items[0].low))
    return [sorted(weights.order[r] for item in b.items for r in range(item.low, item.high)) for b in bins]


def group_tokens(batch: Batch, *, share: bool = True) -> int:
    """Tokens of the largest group of samples, as ``pack`` counts them."""
    members = (np.flatnonzero(batch.group == group) for group in np.unique(batch.group))
    return max((num_forest_tokens(batch, chosen.tolist(), share=share) for chosen in members), default=0)


def _grouped(batch: Batch, prefixes: PrefixOrder, share: bool) -> PrefixOrder:
    """The ranks with each group's next to each other, where the first of them was.

    What two ranks have in common is at least the least that neighbours between them have, in any order; so sizes
    may come out too large where groups interleave, and never too small.
    """
    assert (batch.group >= 0).all(), "samples without a group cannot be kept together"
    groups = batch.group.tolist()
    members: dict[int, list[int]] = {}
    for index in prefixes.order:
        members.setdefault(groups[index], []).append(index)
    order = [index for group in members.values() for index in group]
    shared = [0][: len(order)]
    shared += [prefix_order(batch, pair, share=share).shared[1] for pair in pairwise(order)]
    return PrefixOrder(order, shared)


class _Item(NamedTuple):
    """Ranks ``[low, high)`` (see ``PrefixOrder``), kept together, and the weight of their forest.

    ``split`` is the trie node that was over the cap: ``(tokens repeated if its children part, first rank)``.
    """

    low: int
    high: int
    tokens: int
    cost: float
    split: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Bin:
    """Items that travel together, by rank; ``tokens`` and ``cost`` are those of their common forest."""

    items: list[_Item] = field(default_factory=list[_Item])
    tokens: int = 0
    cost: float = 0.0


class _Sizes:
    """What sets of samples, sorted by rank, weigh together."""

    def __init__(self, batch: Batch, prefixes: PrefixOrder, model: CostModel, keep_groups: bool = False) -> None:
        self.order, self.shared, self.model = prefixes.order, prefixes.shared, model
        self.groups: list[int] = batch.group[self.order].tolist() if keep_groups else list(range(len(self.order)))
        self.lengths: list[int] = batch.lengths[self.order].tolist()
        self.heads: list[float] = (model.head * batch.counts[self.order]).tolist()
        self.shared_by_all = min(self.shared[1:], default=0)
        self._minima = [self.shared]  # [k][r]: least of shared[r : r + 2**k]
        while (reach := 1 << len(self._minima)) <= len(self.order):
            last = self._minima[-1]
            self._minima.append([min(p) for p in zip(last, last[reach // 2 :], strict=False)])

    def common(self, a: int, b: int) -> int:
        """Tokens that ranks ``a < b`` share."""
        level = (b - a).bit_length() - 1
        row = self._minima[level]
        return min(row[a + 1], row[b + 1 - (1 << level)])

    def item(self, low: int, high: int, split: tuple[int, int]) -> _Item:
        prefix = self.model.prefix
        tokens, cost = 0, 0.0
        for rank in range(low, high):
            shared = self.shared[rank] if rank > low else 0
            tokens += self.lengths[rank] - shared
            cost += prefix(self.lengths[rank]) - prefix(shared) + self.heads[rank]
        return _Item(low, high, tokens, cost, split)

    def join(self, items: Iterable[_Item]) -> _Bin:
        joined = _Bin(sorted(items))
        for item in joined.items:
            joined.tokens += item.tokens
            joined.cost += item.cost
        for before, after in pairwise(joined.items):
            shared = self.common(before.high - 1, after.low)
            joined.tokens -= shared
            joined.cost -= self.model.prefix(shared)
        return joined


def _items(weights: _Sizes, cap: int) -> list[_Item]:
    """The largest subtrees that fit under the cap."""
    items: list[_Item] = []
    stack = [((0, 0), run) for run in _cut(weights, 0, len(weights.order), 0)]
    while stack:
        split, (low, high) = stack.pop()
        item = weights.item(low, high, split)
        if item.tokens <= cap:
            items.append(item)
        else:
            between = [r for r in range(low + 1, high) if weights.groups[r] != weights.groups[r - 1]]
            if not between:
                raise GroupTooLong(
                    f"the samples of group {weights.groups[low]} have {item.tokens} tokens together, more than a "
                    f"micro-batch may hold ({cap}): raise system.max_tokens_per_microbatch or shorten them"
                )
            at = min(weights.shared[r] for r in between)
            stack.extend(((at, low), run) for run in _cut(weights, low, high, at))
    return items


def _cut(weights: _Sizes, low: int, high: int, at: int) -> list[tuple[int, int]]:
    """Cut ranks wherever neighbours share no more than ``at`` tokens and are not to be kept together."""
    groups, shared = weights.groups, weights.shared
    cuts = (r for r in range(low + 1, high) if shared[r] <= at and groups[r] != groups[r - 1])
    return list(pairwise([low, *cuts, high])) if high > low else []


def _best_fit(weights: _Sizes, items: list[_Item], cap: int) -> list[_Bin]:
    """Each into the bin of a near relative where it adds least, else into the fullest that takes it.

    Largest first, but children of one split node after each other, before bins fill up with strangers.
    """
    bins: list[_Bin] = []
    fill: list[tuple[int, int]] = []  # (tokens, bin), ascending
    placed: list[tuple[int, int]] = []  # (rank, bin), ascending
    for item in sorted(items, key=lambda i: (-i.split[0], i.split[1], -i.tokens, i.low)):
        near = bisect_left(placed, (item.low, -1))
        homes = {home for _, home in placed[max(0, near - RELATIVES) : near + RELATIVES]}
        joins = [(weights.join([*bins[home].items, item]), home) for home in sorted(homes)]
        relatives = [
            (joined.tokens - bins[home].tokens, home, joined)
            for joined, home in joins
            if joined.tokens <= cap and joined.tokens < bins[home].tokens + item.tokens - weights.shared_by_all
        ]
        if relatives:
            _, chosen, joined = min(relatives, key=lambda r: r[:2])
        elif place := bisect_left(fill, (cap - item.tokens + weights.shared_by_all + 1, -1)):
            chosen = fill[place - 1][1]
            joined = weights.join([*bins[chosen].items, item])
        else:
            chosen, joined = len(bins), weights.join([item])
            bins.append(_Bin())
            insort(fill, (0, chosen))
        del fill[bisect_left(fill, (bins[chosen].tokens, chosen))]
        bins[chosen] = joined
        insort(fill, (joined.tokens, chosen))
        insort(placed, (item.low, chosen))
    return bins


def _spread(weights: _Sizes, items: list[_Item], cap: int, count: int) -> list[_Bin] | None:
    """Costliest first, each into the cheapest bin with room; None where an item finds none soon."""
    bins = [_Bin() for _ in range(count)]
    heap = [(0.0, i) for i in range(count)]
    for item in sorted(items, key=lambda item: (-item.cost, item.low)):
        full: list[tuple[float, int]] = []
        while heap and len(full) < 32:
            cheapest = heap[0][1]
            joined = weights.join([*bins[cheapest].items, item])
            if joined.tokens <= cap:
                bins[cheapest] = joined
                heapq.heapreplace(heap, (joined.cost, cheapest))
                break
            full.append(heapq.heappop(heap))
        else:
            return None
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _shared_out(weights: _Sizes, bins: list[_Bin], count: int, cap: int) -> list[_Bin]:
    """As many as ``count`` instead, of subtrees small enough for that; as they are where those find no room."""
    runs = [list(run) for _, run in groupby(range(len(weights.order)), weights.groups.__getitem__)]
    longest = max(weights.item(run[0], run[-1] + 1, (0, 0)).tokens for run in runs)
    even = -(-sum(b.tokens for b in bins) // count)
    items = _items(weights, min(cap, max(longest, even)))
    return _spread(weights, items, cap, min(count, len(items))) or bins


def _equalise(weights: _Sizes, bins: list[_Bin], cap: int) -> None:
    """Move or swap items between the costliest bin and the cheapest while that brings them closer."""
    for _ in range(EXCHANGES if len(bins) > 1 else 0):
        by_cost = sorted(range(len(bins)), key=lambda i: (bins[i].cost, i))
        heavy = by_cost.pop()
        if not any(_exchange(weights, bins, heavy, light, cap) for light in by_cost[:4]):
            return


def _exchange(weights: _Sizes, bins: list[_Bin], heavy: int, light: int, cap: int) -> bool:
    """Take the best single move or swap between two bins, if there is one."""
    above, below = bins[heavy], bins[light]
    total, best = above.cost + below.cost, above.cost
    found: tuple[_Bin, _Bin] | None = None
    by_cost = sorted(below.items, key=lambda i: (i.cost, i.low))
    for item in sorted(above.items, key=lambda i: (-i.cost, i.low))[:32]:
        wanted = bisect_left(by_cost, item.cost - (above.cost - below.cost) / 2, key=lambda i: i.cost)
        swaps = [[back] for back in by_cost[max(0, wanted - 1) : wanted + 1]]
        for back in ([], *swaps) if len(above.items) > 1 else swaps:
            left = weights.join([*(i for i in above.items if i is not item), *back])
            right = weights.join([*(i for i in below.items if i not in back), item])
            higher = max(left.cost, right.cost)
            fits = left.tokens <= cap and right.tokens <= cap
            if fits and higher < best * (1 - 1e-9) and left.cost + right.cost <= total * REPEATED:
                best, found = higher, (left, right)
    if found is None:
        return False
    bins[heavy], bins[light] = found
    return True
