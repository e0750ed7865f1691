"""Who runs, in a pool that only counts; and the dense pool: rows keep what was written, within the
budget."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tunesmith.run.engines.local.kv_memory import KVLayout, KVMemory
from tunesmith.run.engines.local.kv_pool import HEADROOM, KVPool, compact

from tunesmith.errors import UserError
from tunesmith.run.engines.local.requests import CachedPrompt, LocalRequest, Uniforms
from tunesmith.run.engines.local.scheduler import Scheduler
from tunesmith.types import Sampling


def request(number: int, prompt: Sequence[int] = (5, 6), new: int = 8) -> LocalRequest:
    return LocalRequest(
        prompt_ids=tuple(prompt),
        sampling=Sampling(new),
        max_new_tokens=new,
        stop_token_ids=frozenset(),
        stop_strings=None,
        id=number,
        uniforms=Uniforms(number),
    )


def write(running: Sequence[LocalRequest]) -> None:
    for r in running:
        r.append(9, -1.0, 0)
        r.cached = len(r.token_ids) - 1


class CountingPool:
    """Room for so many tokens, prompts included; unused prompts take none."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.running = list[LocalRequest]()
        self.prompts = list[CachedPrompt]()

    def _used(self, more: Sequence[LocalRequest] = ()) -> int:
        requests = [*self.running, *more]
        return sum(len(r.token_ids) + 1 for r in requests) + sum(
            len(p) for p in {r.prompt for r in requests} if p
        )

    def prompt(self, token_ids: tuple[int, ...], rotary_length: int) -> CachedPrompt | None:
        del rotary_length
        return next((p for p in self.prompts if p.token_ids == token_ids and not p.stale), None)

    def can_admit(self, requests: Sequence[LocalRequest]) -> bool:
        return self._used(requests) <= self.total

    def admit(
        self, requests: Sequence[LocalRequest], waiting: Sequence[LocalRequest]
    ) -> list[CachedPrompt]:
        del waiting
        fresh = list(
            {r.prompt: None for r in requests if r.prompt and r.prompt not in self.prompts}
        )
        self.prompts += fresh
        self.running += requests
        return fresh

    def grow(self, waiting: Sequence[LocalRequest]) -> bool:
        del waiting
        return self._used() <= self.total

    def release(self, requests: Sequence[LocalRequest]) -> None:
        self.running = [r for r in self.running if r not in requests]
        for r in requests:
            r.prompt = None
            r.cached = 0

    def expire_prompts(self) -> None:
        self.prompts = []

    def clear(self) -> None:
        self.running = []
        self.prompts = []

    def allocate(self) -> None: ...


def test_requests_start_in_order_and_share_prompts() -> None:
    scheduler = Scheduler(CountingPool(100), max_running=3, max_prefill_tokens=100)
    scheduler.waiting.extend(request(i) for i in range(5))
    prompts, started = scheduler.admit()
    assert [p.token_ids for p in prompts] == [(5, 6)]
    assert [r.id for r in started] == [0, 1, 2] and scheduler.reused_tokens == 4
    assert scheduler.admit() == ([], [])
    scheduler.release(started[:2])
    prompts, started = scheduler.admit()
    assert not prompts and [r.id for r in started] == [3, 4]


def test_one_prefill_has_a_limit_that_a_single_prompt_may_pass() -> None:
    scheduler = Scheduler(CountingPool(1000), max_running=9, max_prefill_tokens=10)
    scheduler.waiting.extend(request(i, prompt=[i] * n) for i, n in enumerate((30, 6, 4, 1)))
    assert [[r.id for r in scheduler.admit()[1]] for _ in range(3)] == [[0], [1, 2], [3]]


def test_the_youngest_waits_where_memory_is_short_and_comes_first_again() -> None:
    scheduler = Scheduler(CountingPool(14), max_running=9, max_prefill_tokens=100)
    requests = [request(i) for i in range(4)]
    scheduler.waiting.extend(requests)
    assert len(scheduler.admit()[1]) == 4
    while scheduler.preemptions < 2:
        write(scheduler.grow())
    assert list(scheduler.waiting) == requests[2:] and scheduler.pool.running == requests[:2]
    assert requests[3].token_ids and requests[3].cached == 0
    scheduler.release([requests[3]])  # cancelled while it waits
    scheduler.release([requests[0]])
    assert [r.id for r in scheduler.admit()[1]] == [2]


LAYOUT = KVLayout(layers=1, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def mark(pool: KVPool, fresh: Sequence[CachedPrompt]) -> None:
    """Write each request's number in the slots of its tokens, and a number of its own for each
    prompt."""
    for memory in pool.memories:
        for prompt in fresh:
            memory.prompts.memory[:, prompt.row, :, : len(prompt)] = hash(prompt.token_ids) % 1000
        for r in pool.running:
            memory.completions.memory[:, r.row, :, : r.cached] = r.id


def check(pool: KVPool, kv_bytes: int) -> None:
    assert sum(memory.nbytes for memory in pool.memories) <= kv_bytes and pool.used <= pool.total
    for memory in pool.memories:
        for prompt in pool.prompts:
            assert (
                memory.prompts.memory[:, prompt.row, :, : len(prompt)]
                == hash(prompt.token_ids) % 1000
            ).all()
        for r in pool.running:
            assert (memory.completions.memory[:, r.row, :, : r.cached] == r.id).all()
            assert r.cached <= pool.capacity
    assert [p.row for p in pool.prompts] == list(range(len(pool.prompts)))
    in_use = [p.running > 0 for p in pool.prompts]
    assert in_use == sorted(in_use, reverse=True)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), tokens=st.integers(200, 600), models=st.integers(1, 2))
def test_rows_keep_what_was_written_whoever_comes_and_goes(
    seed: int, tokens: int, models: int
) -> None:
    rng = random.Random(seed)
    kv_bytes = tokens * LAYOUT.slot_bytes * models
    pool = KVPool([LAYOUT] * models, kv_bytes, max_running=6, block_size=4)
    scheduler = Scheduler(pool, max_running=6, max_prefill_tokens=60)
    scheduler.waiting.extend(
        request(i, prompt=[rng.randrange(4)] * rng.randrange(3, 40), new=rng.randrange(1, 90))
        for i in range(20)
    )
    ended = 0
    while scheduler.has_work:
        fresh, started = scheduler.admit()
        for r in started:
            r.cached = len(r.token_ids)
        running = started or scheduler.grow()
        write(running)
        mark(pool, fresh)
        done = [r for r in running if len(r.token_ids) >= r.max_new_tokens or rng.random() < 0.02]
        scheduler.release(done)
        ended += len(done)
        if rng.random() < 0.02:
            pool.expire_prompts()
        check(pool, kv_bytes)
    assert ended == 20


def test_memory_is_given_back_and_taken_again() -> None:
    pool = KVPool([LAYOUT], 4096)
    [memory] = pool.memories
    assert 0 < memory.nbytes <= 4096
    pool.clear()
    assert memory.nbytes == 0 and pool.used == 0
    pool.allocate()
    assert 0 < memory.nbytes <= 4096
    with pytest.raises(UserError, match="needs at least 3072 bytes"):
        KVPool([LAYOUT], 3071)


def test_a_new_request_leaves_room_for_others_to_write() -> None:
    pool = KVPool([LAYOUT], 2 * (16 + HEADROOM) * LAYOUT.slot_bytes)
    scheduler = Scheduler(pool, max_running=9, max_prefill_tokens=100)
    scheduler.waiting.extend(request(i, new=200) for i in range(3))
    assert [r.id for r in scheduler.admit()[1]] == [0, 1]


@given(st.lists(st.sampled_from([0, 1, None]), max_size=20))
def test_compact_groups_zones_and_moves_few(zones: list[int | None]) -> None:
    order = compact(zones, lambda z: z)
    assert sorted(order) == [i for i, z in enumerate(zones) if z is not None]
    assert [zones[i] for i in order] == sorted(z for z in zones if z is not None)
    first = zones.count(0)
    second = zones.count(0) + zones.count(1)
    at_home = [i for i, z in enumerate(zones[:second]) if z == (0 if i < first else 1)]
    assert all(order[i] == i for i in at_home)


@pytest.mark.skipif(sys.platform == "win32", reason="zeros are written there")
def test_memory_that_is_never_written_takes_none_on_a_cpu() -> None:
    process = psutil.Process()
    size = 256 << 20
    before = process.memory_info().rss
    memory = KVMemory(
        KVLayout(2, 2, 16, torch.bfloat16, torch.device("cpu")), size // (5 * 2 * 16 * 2)
    )
    assert memory.nbytes == size // 320 * 320 and process.memory_info().rss - before < size // 8
    bank = memory.arranged(memory.prompts, [], 0, (3, 8))
    assert bank.memory.shape == (4, 3, 2, 8, 16) and not bank.memory.any()
    bank.memory.fill_(2)
    assert all(bool((slots == 2).all()) for slots in bank.slots)
    memory.free()
    assert memory.nbytes == 0
    memory.allocate()
    assert not memory.arranged(memory.prompts, [], 0, (3, 8)).memory.any()
