"""Which requests run: admission in order of arrival, and preemption of the youngest where memory is
short."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tunesmith.models.rope import LengthRule
from tunesmith.run.engines.local.kv_pool import KVPool
from tunesmith.run.engines.local.requests import CachedPrompt, LocalRequest, Piece, StepBatch


class Scheduler:
    """The queue in front of a ``KVPool``; it computes nothing.

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
        self.preemptions = 0
        self.reused_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.pool.running)

    def schedule(self) -> StepBatch:
        """The next step: a prefill of the requests that can start; if there are none, a decode step
        of all running."""
        prompts, requests = self.admit()
        if requests:
            pieces = [
                Piece(owner, 0, owner.token_ids)
                for owner in (*prompts, *requests)
                if owner.token_ids
            ]
            return StepBatch(requests, pieces)
        return StepBatch(self.grow())

    def admit(self) -> tuple[list[CachedPrompt], list[LocalRequest]]:
        """Start waiting requests, oldest first; returns the prompts to compute for them, and the
        requests."""
        if self._lengths is not None:  # recompute keys that are rotated for shorter sequences
            running = self.pool.running
            self._requeue(
                [
                    r
                    for r in running
                    if r.prompt and r.prompt.rotary_length != self._rotary_length(r)
                ]
            )
        admitted = self._choose()
        if not admitted:
            return [], []
        try:
            fresh = self.pool.admit(admitted, self.waiting)
        except Exception:  # such as too little memory: they fail with the running ones
            self.pool.running.extend(r for r in admitted if r not in self.pool.running)
            raise
        self.reused_tokens += sum(len(r.prompt_ids) for r in admitted) - sum(map(len, fresh))
        return fresh, admitted

    def grow(self) -> list[LocalRequest]:
        """The running requests, each with room for one more token; the youngest are preempted if
        memory is short."""
        while not self.pool.grow(self.waiting):
            self.preemptions += 1
            self._requeue([max(self.pool.running, key=lambda r: r.id)])
        return list(self.pool.running)

    def release(self, requests: Sequence[LocalRequest]) -> None:
        """Remove requests, running or waiting."""
        gone = set(requests)
        if not gone.isdisjoint(self.waiting):
            self.waiting = deque(r for r in self.waiting if r not in gone)
        self.pool.release([r for r in self.pool.running if r in gone])

    def _choose(self) -> list[LocalRequest]:
        """The requests that start now, each with its prompt."""
        admitted: list[LocalRequest] = []
        fresh: dict[tuple[tuple[int, ...], int], CachedPrompt] = {}
        tokens = 0
        while self.waiting and len(self.pool.running) + len(admitted) < self._max_running:
            request = self.waiting[0]
            key = request.prompt_ids, self._rotary_length(request)
            known = self.pool.prompt(*key) or fresh.get(key)
            cost = len(request.token_ids) + (0 if known else len(request.prompt_ids))
            if admitted and tokens + cost > self._max_prefill_tokens:
                break
            request.prompt = known or CachedPrompt(*key)
            if not self.pool.can_admit([*admitted, request]):
                request.prompt = None
                break
            if known is None:
                fresh[key] = request.prompt
            tokens += cost
            admitted.append(self.waiting.popleft())
        return admitted

    def _requeue(self, requests: Sequence[LocalRequest]) -> None:
        self.pool.release(requests)
        self.waiting.extendleft(sorted(requests, key=lambda r: -r.id))

    def _rotary_length(self, request: LocalRequest) -> int:
        return 1 if self._lengths is None else self._lengths.alike(request.length)
