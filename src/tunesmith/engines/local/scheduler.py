"""Who runs: admission in order, growth, and preemption of the youngest, within the KV budget.

A running request's place in ``running`` is its row in the completion bank; a prompt's place in ``prompts``
is its row in the prompt bank. Prompts in use come first, so that decode attention sees them as one view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from tunesmith.engines.local.kv_cache import KVCache, length_class
from tunesmith.engines.local.requests import CachedPrompt, Request
from tunesmith.models.rope import LengthRule

_Item = TypeVar("_Item")

_HEADROOM = 64
"""Tokens that every running request should be able to write before a new one is let in."""
_SORTED_ROWS = 8
"""Up to so many rows of like lengths are kept in the order of their prompts: single siblings then need no gather."""


def compact(items: Sequence[_Item], zone: Callable[[_Item], int | None]) -> list[int]:
    """An order (of indices) in which each zone is contiguous and few items move; None drops an item.

    Example:
        >>> compact("aXbXc", lambda c: None if c == "X" else 0)
        [0, 4, 2]
    """
    zones = [zone(item) for item in items]
    order: list[int] = []
    for z in sorted({z for z in zones if z is not None}):
        members = [i for i, of in enumerate(zones) if of == z]
        start, stop = len(order), len(order) + len(members)
        movers = [i for i in members if not start <= i < stop]
        staying = {i for i in members if start <= i < stop}
        order.extend(i if i in staying else movers.pop() for i in range(start, stop))
    return order


class Scheduler:
    """Rows and budget; it moves memory but computes nothing."""

    def __init__(
        self, cache: KVCache, max_running: int, max_prefill_tokens: int, lengths: LengthRule | None = None
    ) -> None:
        self.cache = cache
        self.lengths = lengths
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prompts: list[CachedPrompt] = []
        self.preemptions = 0
        self.reused_tokens = 0
        self._clock = 0

    def admit(self) -> tuple[list[CachedPrompt], list[Request]]:
        """Move waiting requests into rows, oldest first.

        Returns:
            The prompts to prefill, and the requests that now run: in one prefill of about
            ``max_prefill_tokens``, unless the first alone is longer.
        """
        self._clock += 1
        admitted, fresh = self._choose()
        if not admitted:
            return [], []
        rows = len(self.running) + len(admitted)
        self._reserve(self._in_use(fresh, admitted), fresh, rows, self._length(admitted, _HEADROOM))
        for prompt in fresh:
            prompt.row = len(self.prompts)
            self.prompts.append(prompt)
        for request in admitted:
            assert request.prompt is not None
            request.prompt.running += 1
            request.prompt.used_at = self._clock
            self.running.append(request)
        self._settle()
        return fresh, admitted

    def outgrown(self) -> None:
        """Have requests computed anew whose cached keys are rotated for shorter sequences than they are now."""
        if self.lengths is None:
            return
        gone = [r for r in self.running if r.prompt is not None and r.prompt.length != self._alike(r)]
        for request in sorted(gone, key=lambda r: -r.id):
            self._leave(request)
            self.waiting.appendleft(request)
        if gone:
            self._settle(set(gone))

    def grow(self) -> list[Request]:
        """Make room for one more token per running request, preempting the youngest where there is none.

        Returns:
            What runs, by row.
        """
        if self._length() <= self.cache.completions.capacity:
            return list(self.running)
        while not self._fits(self._in_use(), len(self.running), self._length()):
            self._preempt(max(self.running, key=lambda r: r.id))
        self._reserve(self._in_use(), [], len(self.running), self._length())
        return list(self.running)

    def release(self, requests: Sequence[Request]) -> None:
        """Free the rows of requests that ended, and what their prompts no longer need."""
        gone = set(requests)
        for request in gone.intersection(self.running):
            self._leave(request)
        if not gone.isdisjoint(self.waiting):
            self.waiting = deque(r for r in self.waiting if r not in gone)
        self._settle(gone)

    def forget_prompts(self) -> None:
        """Cached prompts serve nobody new; those in use go with their last request."""
        for prompt in self.prompts:
            prompt.stale = True
        self._settle()

    def evacuate(self) -> list[Request]:
        """Forget every row and cached prompt, and free the memory; what ran is returned."""
        running, self.running, self.prompts = self.running, [], []
        self.cache.free()
        return running

    def _choose(self) -> tuple[list[Request], list[CachedPrompt]]:
        """Requests that fit, and the prompts among theirs that must be prefilled."""
        known = {(p.token_ids, p.length): p for p in self.prompts if not p.stale}
        admitted: list[Request] = []
        fresh: list[CachedPrompt] = []
        tokens = 0
        for request in self.waiting:
            if len(self.running) + len(admitted) >= self.max_running:
                break
            key = request.prompt_ids, self._alike(request)
            prompt, is_new = known.get(key) or CachedPrompt(*key), key not in known
            cost = len(request.token_ids) + (len(prompt) if is_new else 0)
            if admitted and tokens + cost > self.max_prefill_tokens:
                break
            rows = len(self.running) + len(admitted) + 1
            candidates = [*admitted, request]
            prompts = self._in_use([*fresh, prompt], admitted)
            if not self._fits(prompts, rows, self._length(candidates, _HEADROOM)):
                break
            request.prompt = prompt
            admitted.append(request)
            tokens += cost
            if is_new:
                known[key] = prompt
                fresh.append(prompt)
            else:
                self.reused_tokens += len(prompt)
        for _ in admitted:
            self.waiting.popleft()
        return admitted, fresh

    def _in_use(self, fresh: Sequence[CachedPrompt] = (), admitted: Sequence[Request] = ()) -> list[CachedPrompt]:
        """Prompts that cannot be evicted."""
        used = {p: None for p in self.prompts if p.running}
        used.update({r.prompt: None for r in admitted if r.prompt is not None})
        used.update(dict.fromkeys(fresh))
        return list(used)

    def _length(self, admitted: Sequence[Request] = (), headroom: int = 1) -> int:
        """Completion slots per row for the next ``headroom`` tokens."""
        rows = [(len(r.token_ids), r) for r in admitted] + [(r.cached, r) for r in self.running]
        return max(min(n + headroom, r.kv_length) for n, r in rows)

    def _fits(self, prompts: Sequence[CachedPrompt], rows: int, length: int) -> bool:
        blocks = self.cache.padded
        needed = len(prompts) * blocks(max(map(len, prompts))) + rows * blocks(length)
        return needed <= self.cache.total

    def _reserve(self, used: Sequence[CachedPrompt], fresh: Sequence[CachedPrompt], rows: int, length: int) -> None:
        """Shape the banks for these, evicting the prompts unused for longest."""
        keep = set(used)
        wanted = {r.prompt_ids for r in self.waiting}
        idle = sorted((p for p in self.prompts if p not in keep), key=lambda p: (p.token_ids in wanted, p.used_at))
        kept = [*self.prompts, *fresh]
        while not self._fits(kept, rows, length):
            victim = idle.pop(0)
            kept.remove(victim)
        evicted = set(self.prompts).difference(kept)
        if evicted:
            self._settle(evicted_prompts=evicted)
        self._shape(kept, rows, length)

    def _shape(self, prompts: Sequence[CachedPrompt], rows: int, length: int) -> None:
        """Give both banks at least the shape needed, with slack where the budget has it; shrink first."""
        cache = self.cache
        need_p = (len(prompts), cache.padded(max(map(len, prompts))))
        need_c = (rows, cache.padded(length))
        now_p = (cache.prompts.rows, cache.prompts.capacity)
        now_c = (cache.completions.rows, cache.completions.capacity)
        keep_p, keep_c = _covers(now_p, need_p), _covers(now_c, need_c)
        if keep_p and keep_c:
            return
        longest = max([r.kv_length for r in self.running] + [length])
        slack_rows = min(self.max_running, rows + len(self.waiting))
        slack_c = (slack_rows, min(cache.padded(longest), cache.padded(length + length // 2)))
        choices = [
            (now_p if keep_p else need_p, now_c if keep_c else slack_c),
            (now_p if keep_p else need_p, now_c if keep_c else need_c),
            (need_p, need_c),
        ]
        new_p, new_c = next(c for c in choices if sum(r * n for r, n in c) <= cache.total)
        prompts_shrink = new_p[0] * new_p[1] <= now_p[0] * now_p[1]
        for bank in ("prompts", "completions") if prompts_shrink else ("completions", "prompts"):
            if bank == "prompts" and new_p != now_p:
                used = max(map(len, self.prompts), default=0)
                cache.arrange_prompts(range(len(self.prompts)), used, new_p)
            elif bank == "completions" and new_c != now_c:
                self._order_running(self._sorted(range(len(self.running))), new_c)

    def _order_running(self, order: list[int], shape: tuple[int, int] | None = None) -> None:
        """Row ``i`` becomes what row ``order[i]`` was; rows not named are dropped."""
        now = self.cache.completions.rows, self.cache.completions.capacity
        moving = order if shape else [row for place, row in enumerate(order) if row != place]
        used = max((self.running[i].cached for i in moving), default=0)
        self.cache.arrange_completions(order, used, shape or now)
        self.running = [self.running[i] for i in order]

    def _sorted(self, rows: Sequence[int]) -> list[int]:
        """Those that have written most first, siblings side by side."""
        running = self.running
        return sorted(rows, key=lambda i: (-length_class(running[i].cached), _prompt_row(running[i])))

    def _settle(self, gone: set[Request] | None = None, evicted_prompts: set[CachedPrompt] | None = None) -> None:
        """Close the gaps: prompts in use first, then cached ones; without those that ended or are stale."""
        dropped = evicted_prompts or set()

        def zone(prompt: CachedPrompt) -> int | None:
            if prompt.running:
                return 0
            return None if prompt.stale or prompt in dropped else 1

        order = compact(self.prompts, zone)
        bank = self.cache.prompts
        used = max((len(self.prompts[i]) for i in order), default=0)
        self.cache.arrange_prompts(order, used, (bank.rows, bank.capacity))
        self.prompts = [self.prompts[i] for i in order]
        for row, prompt in enumerate(self.prompts):
            prompt.row = row
        # Those that have written most come first: decode attention takes rows of like lengths together.
        staying = compact(self.running, lambda r: None if gone and r in gone else -length_class(r.cached))
        if len(staying) <= _SORTED_ROWS:
            staying = self._sorted(staying)
        self._order_running(staying)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._leave(request)
        self.waiting.appendleft(request)
        self._settle({request})

    def _alike(self, request: Request) -> int:
        return 1 if self.lengths is None else self.lengths.alike(request.length)

    def _leave(self, request: Request) -> None:
        assert request.prompt is not None
        request.prompt.running -= 1
        request.prompt.used_at = self._clock
        request.prompt = None
        request.cached = 0


def _prompt_row(request: Request) -> int:
    assert request.prompt is not None
    return request.prompt.row


def _covers(shape: tuple[int, int], need: tuple[int, int]) -> bool:
    return shape[0] >= need[0] and shape[1] >= need[1]
