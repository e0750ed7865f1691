"""Tracks which prompt prefixes an engine has already read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, takewhile

BLOCK = 16
"""Tokens per block."""
REMEMBERED = 1 << 16
"""Blocks remembered per engine."""


class Prefixes:
    """The prompt prefixes that one engine has read, as ``blocks``; a block's hash covers all tokens before it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def known(self, blocks: Sequence[int]) -> int:
        """How many leading blocks the engine has seen."""
        return sum(1 for _ in takewhile(self._seen.__contains__, blocks))

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def blocks(token_ids: Sequence[int]) -> list[int]:
    """One hash per whole block, of all tokens up to its end; a prompt shorter than a block is one block."""
    whole = len(token_ids) // BLOCK * BLOCK or len(token_ids)
    pieces = (token_ids[start : start + BLOCK] for start in range(0, whole, BLOCK))
    return list(accumulate(pieces, lambda before, piece: hash((before, *piece)), initial=0))[1:]
