"""Memory for keys and values, within a hard budget.

The scheduler decides which requests run; only the pool and the attention that reads it know where
tokens are. The pool has two rectangular banks: a row per prompt, and a row per running request for
its generated tokens. Rectangles let attention on a CPU read strided views without a gather; the
slots they waste count against the budget. Rows in use are kept together at the front of their bank,
so that a step reads one view of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from tunesmith.errors import UserError
from tunesmith.run.engines.local.kv_memory import KVLayout, KVMemory, Shape
from tunesmith.run.engines.local.requests import CachedPrompt, LocalRequest

HEADROOM = 64
"""Tokens that every running request should have room for when a new one is admitted."""

_Item = TypeVar("_Item")


class KVPool:
    """Two banks, with the same rows for each of its models (``memories``).

    Raises:
        UserError: ``kv_bytes`` hold less than two blocks.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        kv_bytes: int,
        *,
        max_running: int = 256,
        block_size: int = 16,
    ) -> None:
        self.block_size = block_size
        self._max_running = max_running
        slot_bytes = sum(layout.slot_bytes for layout in layouts)
        self.total = kv_bytes // slot_bytes // block_size * block_size
        """Total slots; a slot holds one token."""
        if self.total < 2 * block_size:
            raise UserError(
                f"a KV budget of {kv_bytes} bytes holds {self.total} tokens: this model needs at least "
                f"{2 * block_size * slot_bytes} bytes, two blocks of {block_size} tokens (system.kv_memory)",
                keys=("system.kv_memory",),
            )
        self.memories = [KVMemory(layout, self.total) for layout in layouts]
        self.running: list[LocalRequest] = []
        """The requests that have a row, in the order in which a step computes them."""
        self.prompts: list[CachedPrompt] = []
        self._clock = 0

    @property
    def used(self) -> int:
        """Slots inside the two banks."""
        return _size(self._prompt_shape) + _size(self._shape)

    @property
    def capacity(self) -> int:
        """Slots per running request."""
        return self._shape[1]

    def needed(self, prompt: int, written: int) -> int:
        """Slots that one request needs by itself."""
        return self._padded(prompt) + self._padded(written)

    def prompt(self, token_ids: tuple[int, ...], rotary_length: int) -> CachedPrompt | None:
        """The prompt, if it is in the pool and computed with the current weights."""
        key = token_ids, rotary_length
        return next(
            (p for p in self.prompts if not p.stale and (p.token_ids, p.rotary_length) == key), None
        )

    def can_admit(self, requests: Sequence[LocalRequest]) -> bool:
        """Whether these requests and their prompts fit in addition to the running ones."""
        return self._fits(
            self._in_use(requests),
            len(self.running) + len(requests),
            self._length(requests, HEADROOM),
        )

    def admit(
        self, requests: Sequence[LocalRequest], waiting: Sequence[LocalRequest]
    ) -> list[CachedPrompt]:
        """Give each request a row, evicting unused prompts if space is needed.

        Args:
            waiting: the next requests; their prompts are evicted last.

        Returns:
            The new prompts, which have to be computed.
        """
        self._clock += 1
        fresh = [prompt for prompt in self._in_use(requests) if prompt.row < 0]
        self._reserve(requests, self._length(requests, HEADROOM), waiting)
        self.prompts.extend(fresh)
        for request in requests:
            assert request.prompt is not None
            request.prompt.running += 1
            request.prompt.used_at = self._clock
            self.running.append(request)
        self._close_gaps()
        return fresh

    def grow(self, waiting: Sequence[LocalRequest]) -> bool:
        """Make room for the next token of every running request; False if there is too little
        memory for all."""
        length = self._length()
        if length <= self.capacity:
            return True
        if not self._fits(self._in_use(), len(self.running), length):
            return False
        self._reserve((), length, waiting)
        return True

    def release(self, requests: Sequence[LocalRequest]) -> None:
        """Free the rows of running requests. Their prompts stay until space is needed."""
        for request in requests:
            assert request.prompt is not None
            request.prompt.running -= 1
            request.prompt.used_at = self._clock
            request.prompt = None
            request.row = -1
            request.cached = request.assistant_cached = 0
        if requests:
            self._close_gaps()

    def expire_prompts(self) -> None:
        """After a change of weights: keep prompts only for the requests that use them now."""
        for prompt in self.prompts:
            prompt.stale = True
        self._close_gaps()

    def clear(self) -> list[LocalRequest]:
        """Drop everything and free the memory, until ``allocate``; returns the requests that were
        running."""
        running = self.running
        self.running = []
        self.prompts = []
        for memory in self.memories:
            memory.free()
        return running

    def allocate(self) -> None:
        for memory in self.memories:
            memory.allocate()

    @property
    def _prompt_shape(self) -> Shape:
        return self.memories[0].prompts.shape

    @property
    def _shape(self) -> Shape:
        return self.memories[0].completions.shape

    def _padded(self, tokens: int) -> int:
        """Slots of the blocks that ``tokens`` occupy."""
        return -(-tokens // self.block_size) * self.block_size

    def _in_use(self, admitted: Sequence[LocalRequest] = ()) -> dict[CachedPrompt, None]:
        """Prompts that running or admitted requests use, which must not be evicted; a set that
        keeps its order."""
        used: dict[CachedPrompt, None] = {p: None for p in self.prompts if p.running}
        used.update({r.prompt: None for r in admitted if r.prompt is not None})
        return used

    def _length(self, admitted: Sequence[LocalRequest] = (), headroom: int = 1) -> int:
        """Slots per row for the next ``headroom`` tokens."""
        rows = [(len(r.token_ids), r) for r in admitted] + [(r.cached, r) for r in self.running]
        return max(min(n + headroom, r.kv_length) for n, r in rows)

    def _fits(self, prompts: Collection[CachedPrompt], rows: int, length: int) -> bool:
        return (
            len(prompts) * self._padded(max(map(len, prompts))) + rows * self._padded(length)
            <= self.total
        )

    def _reserve(
        self, admitted: Sequence[LocalRequest], length: int, waiting: Sequence[LocalRequest]
    ) -> None:
        """Resize the banks for running and admitted requests, with ``length`` slots per row.

        If they do not fit, unused prompts are evicted, least recently used first.
        """
        used = self._in_use(admitted)
        wanted = {r.prompt_ids for r in waiting}
        unused = sorted(
            (p for p in self.prompts if p not in used),
            key=lambda p: (p.token_ids in wanted, p.used_at),
        )
        rows = len(self.running) + len(admitted)
        while not self._fits(kept := [*used, *unused], rows, length):
            unused.pop(0)
        self._close_gaps(set(self.prompts).difference(kept))
        self._reshape(
            (len(kept), self._padded(max(map(len, kept)))),
            (rows, self._padded(length)),
            len(waiting),
        )

    def _reshape(self, prompts: Shape, completions: Shape, waiting: int) -> None:
        """Give both banks at least these shapes, and the second bank some slack if the budget
        allows it."""
        now = self._prompt_shape, self._shape
        stay = [
            rows <= now[i][0] and length <= now[i][1]
            for i, (rows, length) in enumerate((prompts, completions))
        ]
        if all(stay):
            return
        rows, length = completions
        longest = max([length, *(self._padded(r.kv_length) for r in self.running)])
        roomy = (
            min(self._max_running, rows + waiting),
            min(longest, self._padded(length + length // 2)),
        )
        first = now[0] if stay[0] else prompts
        choices = (first, now[1] if stay[1] else roomy), (first, now[1] if stay[1] else completions)
        new = next(
            (c for c in choices if _size(c[0]) + _size(c[1]) <= self.total), (prompts, completions)
        )
        moves = [lambda: self._order_prompts(range(len(self.prompts)), new[0])]
        moves.append(lambda: self._order_running(self._by_length(), new[1]))
        for move in (
            moves if _size(new[0]) <= _size(now[0]) else reversed(moves)
        ):  # the bank that shrinks moves first
            move()

    def _close_gaps(self, forgotten: set[CachedPrompt] | None = None) -> None:
        """Order prompts in use before unused ones, and requests with long completions before
        others."""

        def zone(prompt: CachedPrompt) -> int | None:
            if prompt.running:
                return 0
            return None if prompt.stale or (forgotten and prompt in forgotten) else 1

        self._order_prompts(compact(self.prompts, zone), self._prompt_shape)
        self._order_running(self._by_length(), self._shape)

    def _by_length(self) -> list[int]:
        """An order of the running requests, longest first: attention computes rows of similar
        length together."""
        return compact(
            self.running, lambda r: None if r.prompt is None else -length_class(r.cached)
        )

    def _order_prompts(self, order: Sequence[int], shape: Shape) -> None:
        """Move row ``order[i]`` to row ``i``; other rows are dropped."""
        longest = max((len(self.prompts[i]) for i in order), default=0)
        for memory in self.memories:
            memory.prompts = memory.arranged(memory.prompts, order, longest, shape)
        self.prompts = [self.prompts[i] for i in order]
        for row, prompt in enumerate(self.prompts):
            prompt.row = row

    def _order_running(self, order: Sequence[int], shape: Shape) -> None:
        moving = (
            order
            if shape != self._shape
            else [row for place, row in enumerate(order) if row != place]
        )
        longest = max((self.running[i].cached for i in moving), default=0)
        for memory in self.memories:
            memory.completions = memory.arranged(memory.completions, order, longest, shape)
        self.running = [self.running[i] for i in order]
        for row, request in enumerate(self.running):
            request.row = row


def _size(shape: Shape) -> int:
    return shape[0] * shape[1]


def length_class(tokens: int) -> int:
    """0 below 64 tokens, 1 below 128, 2 below 256 and so on: rows are sorted by it."""
    return (tokens // 64).bit_length()


def compact(items: Sequence[_Item], zone: Callable[[_Item], int | None]) -> list[int]:
    """An order (of indices) in which each zone is contiguous and few items move; None drops an
    item.

    Example:
        >>> compact("aXbXc", lambda c: None if c == "X" else 0)
        [0, 4, 2]
    """
    zones = [zone(item) for item in items]
    order: list[int] = []
    for z in sorted({z for z in zones if z is not None}):
        members = [i for i, of in enumerate(zones) if of == z]
        start = len(order)
        stop = len(order) + len(members)
        movers = [i for i in members if not start <= i < stop]
        staying = {i for i in members if start <= i < stop}
        order.extend(i if i in staying else movers.pop() for i in range(start, stop))
    return order
