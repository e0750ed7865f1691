"""Which requests run: admission in order of arrival, and preemption of the youngest where memory is
short."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from tunesmith.models.rope import LengthRule
from tunesmith.run.engines.local.pool import KVPool
from tunesmith.run.engines.local.requests import CachedPrompt, LocalRequest, Piece, StepBatch

HEADROOM = 64
"""Tokens that every running request should have room for when a new one is admitted."""


class Scheduler:
    """The queue in front of a pool, and who has its blocks; it computes nothing.

    Args:
        max_running: limit of running requests.
        max_prefill_tokens: limit of tokens of prompts that start together, unless the first alone
            is longer.
        lengths: which lengths have equal rotary frequencies, if these depend on the length.
    """

    def __init__(
        self,
        pool: KVPool,
        max_running: int,
        max_prefill_tokens: int,
        lengths: LengthRule | None = None,
    ) -> None:
        self.pool = pool
        self._lengths = lengths
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[LocalRequest] = deque()
        self.running: list[LocalRequest] = []
        self._prompts: dict[tuple[tuple[int, ...], int], CachedPrompt] = {}
        """Prompts computed with the current weights, least recently used first."""
        self.preemptions = 0
        self.reused_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> StepBatch:
        """The next step: a prefill of the requests that can start; if there are none, a decode step
        of all running."""
        prompts, requests = self.admit()
        if requests:
            owners = (*prompts, *requests)
            return StepBatch(requests, [Piece(o, 0, o.token_ids) for o in owners if o.token_ids])
        return StepBatch(self.grow())

    def admit(self) -> tuple[list[CachedPrompt], list[LocalRequest]]:
        """Start waiting requests, oldest first; returns the prompts to compute for them, and the
        requests."""
        # Keys that are rotated for shorter sequences are computed again.
        if self._lengths is not None:
            self._requeue([r for r in self.running if r.rotary_length != self._rotary_length(r)])
        fresh: list[CachedPrompt] = []
        admitted: list[LocalRequest] = []
        tokens = 0
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting[0]
            key = request.prompt_ids, self._rotary_length(request)
            prompt = self._prompts.pop(key, None)
            if prompt is not None:
                self._prompts[key] = prompt  # the most recently used is last
            cost = len(request.token_ids) + (0 if prompt else len(request.prompt_ids))
            if admitted and tokens + cost > self._max_prefill_tokens:
                break
            if not self._make_room(request, prompt):
                break
            if prompt is None:
                prompt = CachedPrompt(*key, span=self.pool.admit(len(request.prompt_ids)))
                self._prompts[key] = prompt
                fresh.append(prompt)
            else:
                self.reused_tokens += len(prompt)
            prompt.running += 1
            request.prompt = prompt
            request.span = self.pool.admit(request.first_slots)
            self.running.append(self.waiting.popleft())
            admitted.append(request)
            tokens += cost
        return fresh, admitted

    def grow(self) -> list[LocalRequest]:
        """The running requests, each with room for one more token; the youngest are preempted if
        memory is short."""
        size = self.pool.block_size
        full = [r for r in self.running if r.cached >= len(r.span.blocks) * size]
        for request in sorted(full, key=lambda r: r.id):
            while request.prompt and not self.pool.append(request.span, request.cached + 1):
                if not self._evict():
                    self.preemptions += 1
                    self._requeue([max(self.running, key=lambda r: r.id)])
        return list(self.running)

    def ahead(self, most: int) -> int:
        """How many steps give a token to every running request, without one that must end before
        the last; there is room for them. The first is scheduled already."""
        left = (r.max_new_tokens - len(r.token_ids) for r in self.running)
        steps = min([most, *left])
        if steps > 1:
            needed = self.pool.needed
            more = [needed(r.cached + steps) - len(r.span.blocks) for r in self.running]
            if sum(count for count in more if count > 0) > self.pool.free:
                return 1
            for request, count in zip(self.running, more, strict=True):
                if count > 0:
                    self.pool.append(request.span, request.cached + steps)
        return steps

    def release(self, requests: Sequence[LocalRequest]) -> None:
        """Remove requests, running or waiting. Their prompts stay until space is needed."""
        gone = set(requests)
        self.waiting = deque(r for r in self.waiting if r not in gone)
        for request in gone.intersection(self.running):
            prompt = request.prompt
            assert prompt is not None
            prompt.running -= 1
            if not prompt.running and self._prompts.get(prompt.key) is not prompt:
                self.pool.release(prompt.span)
            self.pool.release(request.span)
            request.forget()
        self.running = [r for r in self.running if r not in gone]

    def expire_prompts(self) -> None:
        """After a change of weights: keep prompts only for the requests that use them now."""
        while self._evict():
            pass
        self._prompts = {}

    def clear(self) -> list[LocalRequest]:
        """Drop everything and free the memory, until ``pool.allocate``; returns the requests that
        were running."""
        running = self.running
        self.running = []
        self._prompts = {}
        self.pool.clear()
        return running

    def _make_room(self, request: LocalRequest, prompt: CachedPrompt | None) -> bool:
        """Free the blocks that a request starts with, if it and the running ones can all go on for
        a while."""
        needed = self.pool.needed
        fresh = 0 if prompt else needed(len(request.prompt_ids))
        promised = fresh + sum(
            max(0, needed(min(len(r.token_ids) + HEADROOM, r.kv_length)) - len(r.span.blocks))
            for r in (*self.running, request)
        )
        if promised > self.pool.free + sum(len(p.span.blocks) for p in self._unused(prompt)):
            return False
        first = fresh + needed(request.first_slots)
        spans = 1 if prompt else 2
        while self.pool.free < first or not self.pool.takes(spans):
            if not self._evict(prompt):
                return False
        return True

    def _unused(self, wanted: CachedPrompt | None) -> list[CachedPrompt]:
        return [p for p in self._prompts.values() if not p.running and p is not wanted]

    def _evict(self, wanted: CachedPrompt | None = None) -> bool:
        """Release the unused prompt that was used longest ago, those of the next requests last;
        False if there is none."""
        unused = self._unused(wanted)
        if not unused:
            return False
        coming = {r.prompt_ids for r in islice(self.waiting, self._max_running)}
        prompt = next((p for p in unused if p.token_ids not in coming), unused[0])
        self.pool.release(self._prompts.pop(prompt.key).span)
        return True

    def _requeue(self, requests: Sequence[LocalRequest]) -> None:
        self.release(requests)
        self.waiting.extendleft(sorted(requests, key=lambda r: -r.id))

    def _rotary_length(self, request: LocalRequest) -> int:
        return 1 if self._lengths is None else self._lengths.alike(request.length)
