"""Grouping samples into micro-batches. No torch.

The token cap is hard. Best fit produces few micro-batches and keeps samples with a common prompt
together. Then moves and swaps balance the costs, because ranks wait for each other: this saves up
to 6 % of the operations on 2 to 8 ranks (``python -m benchmarks.packing``). The result is
deterministic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tunesmith.costs import CostModel
from tunesmith.errors import DataError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.trie import PrefixOrder, num_forest_tokens, prefix_order

EXCHANGES = 200
"""Maximum number of moves and swaps that balance costs; each lowers the highest cost."""
REPEATED = 1.001
"""The factor by which a move or swap may raise the total cost of two bins, by repeating a
prefix."""
RELATIVES = 4
"""The number of trie neighbours on either side whose bins an item tries first."""


class SampleTooLong(DataError):
    """A single sample exceeds the cap."""


class GroupTooLong(DataError):
    """Samples that must share a micro-batch together exceed the cap."""


def pack(
    batch: Batch,
    max_tokens: int,
    *,
    share: bool = True,
    cost: CostModel | None = None,
    keep_groups: bool = False,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Partition a batch's samples into micro-batches whose forests have at most ``max_tokens``
    tokens.

    A tree that exceeds the cap is split, and its prefix repeated.

    Args:
        keep_groups: put all samples of a ``group`` into one micro-batch, for a loss that compares
            them.
        multiple_of: the number of ranks; the number of micro-batches is a multiple of it if there
            are enough samples.

    Returns:
        Indices of samples, ascending in each micro-batch. The costliest micro-batch is first, so
        that running out of memory shows immediately.

    Raises:
        SampleTooLong: a sample exceeds ``max_tokens``.
        GroupTooLong: a group exceeds ``max_tokens``, with ``keep_groups``.
    """
    for index in np.flatnonzero(batch.lengths > max_tokens)[:1].tolist():
        raise SampleTooLong(
            f"sample {index} has {batch.lengths[index]} tokens, more than a micro-batch may hold "
            f"({max_tokens}): raise system.max_tokens_per_microbatch or shorten the sample"
        )
    prefixes = prefix_order(batch, share=share)
    if keep_groups:
        prefixes = _group(batch, prefixes, share)
    sizes = _Sizes(batch, prefixes, cost or CostModel(), keep_groups)
    bins = _place(sizes, _items(sizes, max_tokens), max_tokens) or []
    missing = -len(bins) % multiple_of
    if missing:
        bins = _spread(sizes, bins, len(bins) + missing, max_tokens)
    _equalise(sizes, bins, max_tokens)
    bins = [b for b in bins if b.items]
    bins.sort(key=lambda b: (-b.cost, b.items[0].low))
    ranks = ([r for item in b.items for r in range(item.low, item.high)] for b in bins)
    return [sorted(sizes.order[r] for r in of_bin) for of_bin in ranks]


def group_tokens(batch: Batch, *, share: bool = True) -> int:
    """Forest tokens of the largest group of samples."""
    members = (np.flatnonzero(batch.group == group) for group in np.unique(batch.group))
    sizes = (num_forest_tokens(batch, chosen.tolist(), share=share) for chosen in members)
    return max(sizes, default=0)


def _group(batch: Batch, prefixes: PrefixOrder, share: bool) -> PrefixOrder:
    """The order in which each group's samples are adjacent, at the rank of the group's first
    sample.

    The minimum of ``shared`` between two ranks is a lower bound on their common prefix in any
    order, so sizes may be overestimated where groups interleave, but never underestimated.
    """
    assert (batch.group >= 0).all(), "samples without a group cannot be kept together"
    groups = batch.group.tolist()
    members: dict[int, list[int]] = {}
    for index in prefixes.order:
        members.setdefault(groups[index], []).append(index)
    order = [index for group in members.values() for index in group]
    shared = [prefix_order(batch, pair, share=share).shared[1] for pair in pairwise(order)]
    return PrefixOrder(order, [0, *shared][: len(order)])


class _Item(NamedTuple):
    """Ranks ``[low, high)`` (see ``PrefixOrder``) that stay together, with the size of their
    forest.

    ``split`` identifies the oversized trie node that the item was cut from: ``(tokens of its
    prefix, first rank)``.
    """

    low: int
    high: int
    tokens: int
    cost: float
    split: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Bin:
    """The items of a micro-batch, by rank, with the size of their forest."""

    items: list[_Item] = field(default_factory=list[_Item])
    tokens: int = 0
    cost: float = 0.0


class _Sizes:
    """Computes tokens and costs of sets of samples, sorted by rank."""

    def __init__(
        self, batch: Batch, prefixes: PrefixOrder, model: CostModel, keep_groups: bool = False
    ) -> None:
        self.order = prefixes.order
        self.shared = prefixes.shared
        self.model = model
        self.groups: list[int] = (
            batch.group[self.order].tolist() if keep_groups else list(range(len(self.order)))
        )
        self.lengths: list[int] = batch.lengths[self.order].tolist()
        self.heads: list[float] = (model.head * batch.counts[self.order]).tolist()
        self.shared_by_all = min(self.shared[1:], default=0)
        self._minima = [self.shared]  # [k][r]: minimum of shared[r : r + 2**k]
        for level in range(1, len(self.order).bit_length()):
            last = self._minima[-1]
            self._minima.append(list(map(min, last, last[1 << (level - 1) :])))

    def common(self, a: int, b: int) -> int:
        """Leading tokens that ranks ``a < b`` share."""
        level = (b - a).bit_length() - 1
        row = self._minima[level]
        return min(row[a + 1], row[b + 1 - (1 << level)])

    def item(self, low: int, high: int, split: tuple[int, int]) -> _Item:
        prefix = self.model.prefix
        tokens = 0
        cost = 0.0
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


def _items(sizes: _Sizes, cap: int) -> list[_Item]:
    """The largest subtrees that fit under the cap."""
    items: list[_Item] = []
    stack = [((0, 0), run) for run in _cut(sizes, 0, len(sizes.order), 0)]
    while stack:
        split, (low, high) = stack.pop()
        item = sizes.item(low, high, split)
        if item.tokens <= cap:
            items.append(item)
        else:
            between = [r for r in range(low + 1, high) if sizes.groups[r] != sizes.groups[r - 1]]
            if not between:
                raise GroupTooLong(
                    f"the samples of group {sizes.groups[low]} have {item.tokens} tokens together, "
                    f"more than a micro-batch may hold ({cap}): raise "
                    "system.max_tokens_per_microbatch or shorten them"
                )
            at = min(sizes.shared[r] for r in between)
            stack.extend(((at, low), run) for run in _cut(sizes, low, high, at))
    return items


def _cut(sizes: _Sizes, low: int, high: int, at: int) -> list[tuple[int, int]]:
    """Cut ranks where neighbours share at most ``at`` tokens and belong to different groups."""
    groups = sizes.groups
    shared = sizes.shared
    cuts = (r for r in range(low + 1, high) if shared[r] <= at and groups[r] != groups[r - 1])
    return list(pairwise([low, *cuts, high])) if high > low else []


def _place(sizes: _Sizes, items: list[_Item], cap: int, count: int = 0) -> list[_Bin] | None:
    """Put each item into the bin of a near relative where it adds the fewest tokens, else into
    another with room.

    That other bin is the cheapest of ``count`` bins or, with ``count = 0``, the fullest or a new
    one. The largest item goes first, but the children of a split node are placed together, before
    other items fill their bins.

    Returns:
        The bins; None if an item does not fit into ``count`` bins.
    """
    size = attrgetter("cost" if count else "tokens")
    bins = [_Bin() for _ in range(count)]
    fill: list[tuple[float, int]] = [(0, index) for index in range(count)]  # (size, bin), ascending
    placed: list[tuple[int, int]] = []  # (rank, bin), ascending
    for item in sorted(items, key=lambda i: (-i.split[0], i.split[1], -size(i), i.low)):
        near = bisect_left(placed, (item.low, -1))
        homes = {home for _, home in placed[max(0, near - RELATIVES) : near + RELATIVES]}
        joined = {home: sizes.join([*bins[home].items, item]) for home in sorted(homes)}
        added = {home: bin_.tokens - bins[home].tokens for home, bin_ in joined.items()}
        alone = item.tokens - sizes.shared_by_all
        sharing = [home for home, tokens in added.items() if tokens < alone]
        sharing = [home for home in sharing if bins[home].tokens + added[home] <= cap]
        if sharing:
            chosen = min(sharing, key=added.__getitem__)
        elif count:
            with_room = (i for _, i in fill if sizes.join([*bins[i].items, item]).tokens <= cap)
            chosen = next(with_room, -1)
            if chosen < 0:
                return None
        else:
            place = bisect_left(fill, (cap - item.tokens + sizes.shared_by_all + 1, -1))
            if not place:
                fill.insert(0, (0, len(bins)))
                bins.append(_Bin())
            chosen = fill[max(0, place - 1)][1]
        del fill[bisect_left(fill, (size(bins[chosen]), chosen))]
        bins[chosen] = sizes.join([*bins[chosen].items, item])
        insort(fill, (size(bins[chosen]), chosen))
        insort(placed, (item.low, chosen))
    return bins


def _spread(sizes: _Sizes, bins: list[_Bin], count: int, cap: int) -> list[_Bin]:
    """``count`` bins of smaller subtrees with the smallest cap that suffices; the given bins if
    none does."""
    runs = [list(run) for _, run in groupby(range(len(sizes.order)), sizes.groups.__getitem__)]
    longest = max(sizes.item(run[0], run[-1] + 1, (0, 0)).tokens for run in runs)
    room = max(longest, -(-sum(b.tokens for b in bins) // count))
    while True:
        items = _items(sizes, room)
        spread = _place(sizes, items, room, min(count, len(items)))
        if spread or room >= cap:
            return spread or bins
        room = min(cap, room + room // 16 + 1)


def _equalise(sizes: _Sizes, bins: list[_Bin], cap: int) -> None:
    """Move or swap items between the costliest bin and one of the cheapest as long as the higher
    cost falls."""
    for _ in range(EXCHANGES if len(bins) > 1 else 0):
        by_cost = sorted(range(len(bins)), key=lambda i: (bins[i].cost, i))
        heavy = by_cost.pop()
        if not any(_exchange(sizes, bins, heavy, light, cap) for light in by_cost[:4]):
            return


def _exchange(sizes: _Sizes, bins: list[_Bin], heavy: int, light: int, cap: int) -> bool:
    """Make the best single move or swap between two bins if it lowers the higher cost; return
    whether it did."""
    above = bins[heavy]
    below = bins[light]
    total = above.cost + below.cost
    best = above.cost
    pair: tuple[_Bin, _Bin] | None = None
    by_cost = sorted(below.items, key=lambda i: (i.cost, i.low))
    for item in sorted(above.items, key=lambda i: (-i.cost, i.low))[:32]:
        cost = item.cost - (above.cost - below.cost) / 2
        wanted = bisect_left(by_cost, cost, key=lambda i: i.cost)
        swaps = [[back] for back in by_cost[max(0, wanted - 1) : wanted + 1]]
        for back in ([], *swaps) if len(above.items) > 1 else swaps:
            left = sizes.join([*(i for i in above.items if i is not item), *back])
            right = sizes.join([*(i for i in below.items if i not in back), item])
            higher = max(left.cost, right.cost)
            fits = left.tokens <= cap and right.tokens <= cap
            if fits and higher < best * (1 - 1e-9) and left.cost + right.cost <= total * REPEATED:
                best = higher
                pair = (left, right)
    if pair is not None:
        bins[heavy], bins[light] = pair
    return pair is not None
