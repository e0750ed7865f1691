"""PyTorch's caching allocator for large tensors, in which a fake device's tensors lie.

It takes segments from the driver and cuts them into blocks. A freed block joins its free neighbours
in the segment, and a tensor takes the smallest free block in which it has room. A segment goes back
to the driver only when nothing in it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MB = 1 << 20
SMALL_SEGMENT = 20 * MB
"""Of tensors below ``LARGE``."""
LARGE = 10 * MB
ROUNDED = 2 * MB
"""Larger segments are multiples of this."""


@dataclass(slots=True, eq=False)
class Block:
    size: int
    used: bool = False


@dataclass(slots=True)
class CachingAllocator:
    segments: list[list[Block]] = field(default_factory=list[list[Block]])
    """The blocks of each, in order."""

    @property
    def reserved(self) -> int:
        return sum(block.size for segment in self.segments for block in segment)

    def take(self, size: int) -> Block:
        free = [
            (block.size, index, place)
            for index, segment in enumerate(self.segments)
            for place, block in enumerate(segment)
            if not block.used and block.size >= size
        ]
        if not free:
            whole = SMALL_SEGMENT if size < LARGE else -(-size // ROUNDED) * ROUNDED
            self.segments.append([Block(whole)])
            free = [(whole, len(self.segments) - 1, 0)]
        _, index, place = min(free)
        found = self.segments[index][place]
        rest = found.size - size
        if rest >= MB:
            found.size = size
            self.segments[index].insert(place + 1, Block(rest))
        found.used = True
        return found

    def give(self, block: Block) -> None:
        block.used = False
        for segment in self.segments:
            joined: list[Block] = []
            for each in segment:
                if joined and not joined[-1].used and not each.used:
                    joined[-1].size += each.size
                else:
                    joined.append(each)
            segment[:] = joined

    def empty_cache(self) -> None:
        self.segments = [each for each in self.segments if any(block.used for block in each)]
