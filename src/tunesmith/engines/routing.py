"""Which engine of a pool has read the beginning of a prompt already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
"""Tokens that are looked up together."""
REMEMBERED = 1 << 16
"""Blocks that are kept in mind per engine."""


class Prefixes:
    """The beginnings one engine was given, in blocks: a block counts with all that stands before it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def known(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the start of these the engine has seen, in whole blocks."""
        known = 0
        for block in _blocks(token_ids):
            if block not in self._seen:
                break
            known += BLOCK
        return known

    def add(self, token_ids: Sequence[int]) -> None:
        for block in _blocks(token_ids):
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        self._seen.clear()


def _blocks(token_ids: Sequence[int]) -> Iterator[int]:
    """A hash per whole block; of a shorter prompt, of all there is."""
    running = 0
    whole = len(token_ids) // BLOCK * BLOCK or len(token_ids)
    for start in range(0, whole, BLOCK):
        running = hash((running, *token_ids[start : start + BLOCK]))
        yield running
