"""Who runs, and who has blocks: they keep what was written, within the budget."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tunesmith.errors import UserError
from tunesmith.models.rope import LengthRule
from tunesmith.run.engines.local.pool import KVLayout, KVMemory, KVPool
from tunesmith.run.engines.local.requests import LocalRequest, Uniforms
from tunesmith.run.engines.local.scheduler import HEADROOM, Scheduler
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


LAYOUT = KVLayout(layers=1, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def of(tokens: int, block_size: int = 1) -> KVPool:
    return KVPool([LAYOUT], tokens * LAYOUT.token_bytes, block_size=block_size)


def test_requests_start_in_order_and_share_prompts() -> None:
    scheduler = Scheduler(of(100), max_running=3, max_prefill_tokens=100)
    scheduler.waiting.extend(request(i) for i in range(5))
    prompts, started = scheduler.admit()
    assert [p.token_ids for p in prompts] == [(5, 6)]
    assert [r.id for r in started] == [0, 1, 2] and scheduler.reused_tokens == 4
    assert scheduler.admit() == ([], [])
    scheduler.release(started[:2])
    prompts, started = scheduler.admit()
    assert not prompts and [r.id for r in started] == [3, 4]


def test_one_prefill_has_a_limit_that_a_single_prompt_may_pass() -> None:
    scheduler = Scheduler(of(1000), max_running=9, max_prefill_tokens=10)
    scheduler.waiting.extend(request(i, prompt=[i] * n) for i, n in enumerate((30, 6, 4, 1)))
    assert [[r.id for r in scheduler.admit()[1]] for _ in range(3)] == [[0], [1, 2], [3]]


def test_steps_ahead_have_room_and_end_with_the_first_request() -> None:
    pool = of(2 + 4 * HEADROOM)
    scheduler = Scheduler(pool, max_running=9, max_prefill_tokens=100)
    scheduler.waiting.extend([request(0, new=200), request(1, new=12)])
    _, started = scheduler.admit()
    write(started)
    assert scheduler.grow() == started
    assert scheduler.ahead(16) == 11 and scheduler.ahead(4) == 4
    assert all(len(r.span.blocks) == r.cached + 11 for r in started)
    scheduler.release([started[1]])
    pool.admit(pool.free - 3)
    before = len(started[0].span.blocks)
    assert scheduler.ahead(16) == 1 and len(started[0].span.blocks) == before
    assert scheduler.ahead(before + 3) == before + 3


def test_the_youngest_waits_where_memory_is_short_and_comes_first_again() -> None:
    scheduler = Scheduler(of(2 + 4 * HEADROOM), max_running=9, max_prefill_tokens=100)
    requests = [request(i, new=200) for i in range(4)]
    scheduler.waiting.extend(requests)
    assert len(scheduler.admit()[1]) == 4
    while scheduler.preemptions < 2:
        write(scheduler.grow())
    assert list(scheduler.waiting) == requests[2:] and scheduler.running == requests[:2]
    assert requests[3].token_ids and requests[3].cached == 0
    scheduler.release([requests[3]])  # cancelled while it waits
    scheduler.release(requests[:2])
    assert [r.id for r in scheduler.admit()[1]] == [2]


def mark(memory: KVMemory, scheduler: Scheduler) -> None:
    """Write each request's number in the slots of its tokens."""
    for r in scheduler.running:
        block, place = slots(r)
        for plane in memory.planes:
            plane[block, :, place] = r.id


def slots(r: LocalRequest) -> tuple[Tensor, Tensor]:
    """The block of each token, and its place there."""
    at = torch.arange(r.cached)
    return torch.tensor(r.span.blocks)[at // 4], at % 4


def check(pool: KVPool, scheduler: Scheduler) -> None:
    spans = {r.span for r in scheduler.running}
    spans |= {r.prompt.span for r in scheduler.running if r.prompt}
    blocks = [block for span in spans for block in span.blocks]
    assert len(blocks) == len(set(blocks)) <= pool.blocks - pool.free
    for memory in pool.memories:
        for r in scheduler.running:
            assert pool.needed(r.cached) <= len(r.span.blocks)
            block, place = slots(r)
            assert all((plane[block, :, place] == r.id).all() for plane in memory.planes)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), tokens=st.integers(200, 600))
@pytest.mark.more
def test_blocks_keep_what_was_written_whoever_comes_and_goes(seed: int, tokens: int) -> None:
    rng = random.Random(seed)
    pool = of(tokens, block_size=4)
    scheduler = Scheduler(pool, max_running=6, max_prefill_tokens=60)
    scheduler.waiting.extend(
        request(i, prompt=[rng.randrange(4)] * rng.randrange(3, 40), new=rng.randrange(1, 90))
        for i in range(20)
    )
    ended = 0
    while scheduler.has_work:
        _, started = scheduler.admit()
        for r in started:
            r.cached = len(r.token_ids)
        running = started or scheduler.grow()
        write(running)
        mark(pool.memories[0], scheduler)
        check(pool, scheduler)
        done = [r for r in running if len(r.token_ids) >= r.max_new_tokens or rng.random() < 0.02]
        scheduler.release(done)
        ended += len(done)
        if rng.random() < 0.02:
            scheduler.expire_prompts()
    assert ended == 20
    scheduler.expire_prompts()
    assert pool.free == pool.blocks


def test_memory_is_given_back_and_taken_again() -> None:
    pool = KVPool([LAYOUT], 4096)
    [memory] = pool.memories
    assert 0 < memory.nbytes <= 4096
    pool.clear()
    assert memory.nbytes == 0 and pool.free == pool.blocks
    pool.allocate()
    assert 0 < memory.nbytes <= 4096
    with pytest.raises(UserError, match="needs at least 4096 bytes"):
        KVPool([LAYOUT], 4095)


def test_a_new_request_leaves_room_for_others_to_write() -> None:
    pool = of(2 * (16 + HEADROOM), 16)
    scheduler = Scheduler(pool, max_running=9, max_prefill_tokens=100)
    scheduler.waiting.extend(request(i, new=200) for i in range(3))
    assert [r.id for r in scheduler.admit()[1]] == [0, 1]


def test_a_request_that_fits_exactly_starts_again_before_its_last_token() -> None:
    """Its frequencies change there; the last token needs no slot."""
    scheduler = Scheduler(of(32, 16), 9, 100, LengthRule(switches=(31,)))
    only = request(0, prompt=range(5, 21), new=17)
    scheduler.waiting.append(only)
    assert scheduler.admit()[1] == [only]
    for _ in range(16):
        assert scheduler.admit()[1] == [] and scheduler.grow() == [only]
        write([only])
    assert scheduler.admit()[1] == [only] and len(only.token_ids) == 16


@pytest.mark.skipif(sys.platform == "win32", reason="zeros are written there")
def test_memory_that_is_never_written_takes_none_on_a_cpu() -> None:
    process = psutil.Process()
    size = 256 << 20
    before = process.memory_info().rss
    layout = KVLayout(2, 2, 16, torch.bfloat16, torch.device("cpu"))
    memory = KVMemory(layout, size // layout.token_bytes // 16, 16)
    assert memory.nbytes == size and process.memory_info().rss - before < size // 8
    for plane in memory.planes:
        plane[3].fill_(2)
    memory.free()
    assert memory.nbytes == 0
    memory.allocate()
    assert not any(plane[:8].any() for plane in memory.planes)
