"""The embedded engine: equal to generate, within its budget, whatever runs beside."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import SPECIAL
from tests.support.tiny import save_model
from tunesmith.costs import PeakRates
from tunesmith.errors import EngineError, EngineLostError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.decoding import DECODING, KVSpan
from tunesmith.run.engines.local import decode_model
from tunesmith.run.engines.local.decode_model import wide_head
from tunesmith.run.engines.local.engine import LocalEngine, end_of_sequence_ids
from tunesmith.run.engines.local.pool import KVPool
from tunesmith.run.engines.local.requests import CachedPrompt, Piece, split_pieces
from tunesmith.run.engines.local.runner import Runner
from tunesmith.types import Completion, Sampling

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt2": {},
    "mistral": {"sliding_window": 8, "head_dim": 8},
    "gpt_oss": SPECIAL["gpt_oss"],
    "deepseek_v3": SPECIAL["deepseek_v3"],
}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Of one token in the tiny llama: 2 layers, keys and values, 2 heads of 8, fp32."""
SLOT_BYTES = TOKEN_BYTES * 5 // 4
"""With a quarter to spare."""


def make(model: CausalLM, tokens: int = 4096, **options: Any) -> LocalEngine:
    """An engine whose KV memory holds so many tokens."""
    sizes = {"max_running": 16, "max_prefill_tokens": 64, **options}
    return LocalEngine(model, kv_bytes=tokens * SLOT_BYTES, **sizes)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, 260) for _ in range(n)] for n in lengths]


def free(tokens: int, seed: int = 0, **options: Any) -> Sampling:
    return Sampling(tokens, ignore_eos=True, seed=seed, **options)


async def together(
    engine: LocalEngine, *requests: tuple[Sequence[int], Sampling]
) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(p, s) for p, s in requests))


def run(engine: LocalEngine, *requests: tuple[Sequence[int], Sampling]) -> list[Completion]:
    return asyncio.run(together(engine, *requests))


def scores(
    plain: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> list[float]:
    with torch.inference_mode():
        logits = (
            plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            / temperature
        )
    return (
        logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()
    )


@cache
def plain_of(family: str) -> Any:
    with TemporaryDirectory() as folder:
        save_model(Path(folder), family, **FAMILIES[family])
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@cache
def generated(family: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """What transformers writes greedily."""
    ids = torch.tensor([prompt])
    written = plain_of(family).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    return written[0, len(prompt) :].tolist()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.more
def test_greedy_is_generate_and_logprobs_are_the_trainers(
    family: str, compiled: bool, tmp_path: Path
) -> None:
    """Prompts of unequal length, alone and in groups, chunked and together; every window is
    passed."""
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]))
    engine = make(model, 16384, max_running=7, max_prefill_tokens=20, compiled=compiled)
    starts = prompts(1, 5, 12, 33)
    requests = [
        (p, Sampling(16 + 3 * i, temperature=t, seed=i))
        for i, p in enumerate(starts)
        for t in (0, 0.8, 0)
    ]
    for (prompt, sampling), done in zip(requests, run(engine, *requests), strict=True):
        if sampling.temperature == 0:
            assert done.token_ids == generated(family, tuple(prompt), sampling.max_new_tokens)
        expected_scores = scores(
            plain_of(family), prompt, done.token_ids, sampling.temperature or 1.0
        )
        assert done.logprobs == pytest.approx(expected_scores, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.more
def test_long_and_short_completions_side_by_side(family: str, tmp_path: Path) -> None:
    """Each is scored as if it were alone."""
    save_model(tmp_path, family, **FAMILIES[family], max_position_embeddings=512)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    engine = make(CausalLM.load(tmp_path), 16384, max_running=12, compiled=False)
    starts = prompts(3, 9, 20)
    lengths = (300, 10, 150, 5, 70, 40, 20, 90, 8, 30, 60, 12, 25, 110, 15, 200)
    requests = [(starts[i % 3], free(n, i)) for i, n in enumerate(lengths)]
    for (prompt, sampling), done in zip(requests, run(engine, *requests), strict=True):
        assert len(done.token_ids) == sampling.max_new_tokens
        assert done.logprobs == pytest.approx(scores(plain, prompt, done.token_ids), abs=1e-4)


def test_without_registered_functions_pytorchs_operations_decode(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DECODING, "rooms", ())
    (start,) = prompts(7)
    (done,) = run(make(llama), (start, Sampling(9, temperature=0)))
    assert done.token_ids == generated("llama", tuple(start), 9)


def test_a_prompt_is_prefilled_once_for_its_group(llama: CausalLM) -> None:
    engine = make(llama)
    group = prompts(20)[0]
    run(engine, *[(group, free(5, seed)) for seed in range(8)])
    stats = engine.stats()
    assert (stats.prefilled_tokens, stats.reused_prompt_tokens, stats.sampled_tokens) == (
        20,
        140,
        40,
    )
    run(engine, (group, free(5)))
    assert engine.stats().prefilled_tokens == 20
    asyncio.run(engine.load_weights(1))
    run(engine, (group, free(5)))
    assert engine.stats().prefilled_tokens == 40


def test_new_weights_reach_the_next_token(llama: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are shared: changed in place, they count at once; a request in flight has both
    versions."""
    weight = llama.head.weight
    (prompt,) = prompts(6)
    engine = make(llama, update=lambda: weight.neg_())
    before = run(engine, (prompt, free(8, temperature=0)))[0]
    counted = engine.stats()

    held = held_at(4)

    async def change() -> tuple[Completion, Completion]:
        flying = asyncio.create_task(engine.generate(prompt, free(8, temperature=0)))
        while engine.stats().since(counted).sampled_tokens < 1:
            await asyncio.sleep(0)
        loading = asyncio.create_task(engine.load_weights(1))
        await turns()
        held.go.set()
        await loading
        return await flying, await engine.generate(prompt, free(8, temperature=0))

    at_each_step(monkeypatch, held)
    try:
        flying, after = asyncio.run(change())
    finally:
        weight.detach().neg_()
    split = flying.versions.count(0)
    assert 1 <= split < 8
    assert flying.versions == [0] * split + [1] * (8 - split)
    assert flying.token_ids[:split] == before.token_ids[:split]
    assert after.token_ids != before.token_ids


def test_an_engine_whose_weights_came_in_part_waits_for_all_of_them(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is drawn before that, of requests in flight or of new ones."""
    weight = llama.head.weight
    (prompt, other) = prompts(6, 9)
    failing = [True, False]

    def update() -> None:
        weight.neg_()
        if failing.pop(0):
            raise EngineError("the rest did not come")

    engine = make(llama, update=update)
    before = run(engine, (prompt, free(8, temperature=0)), (other, free(5)))
    counted = engine.stats().sampled_tokens
    held = held_at(4)

    async def load() -> tuple[int, Completion, Completion]:
        flying = asyncio.create_task(engine.generate(prompt, free(8, temperature=0)))
        while engine.stats().sampled_tokens == counted:
            await asyncio.sleep(0)
        loading = asyncio.create_task(engine.load_weights(1))
        await turns()
        held.go.set()
        with pytest.raises(EngineError, match="the rest did not come"):
            await loading
        drawn = engine.stats().sampled_tokens
        waiting = asyncio.create_task(engine.generate(other, free(5)))
        for _ in range(5):
            await engine._thread.call(lambda: None)  # a step would follow
        assert engine.stats().sampled_tokens == drawn
        await engine.load_weights(2)
        return drawn - counted, await flying, await waiting

    at_each_step(monkeypatch, held)
    split, flying, waited = asyncio.run(load())
    assert not failing and 1 <= split < 8
    assert [flying.token_ids, waited.token_ids] == [done.token_ids for done in before], (
        "with the right weights"
    )
    assert flying.versions == [0] * split + [2] * (8 - split) and waited.versions == [2] * 5


@pytest.mark.parametrize("tokens", [96, 128, 200, 320])
def test_a_tight_budget_changes_nothing_but_time(llama: CausalLM, tokens: int) -> None:
    """Waiting, eviction and preemption, over unequal prompts and lengths."""
    requests = [(prompts(4, 9, 17)[i % 3], free(10 + 5 * (i % 7), i)) for i in range(18)]
    roomy = run(make(llama), *requests)
    engine = make(llama, tokens, block_size=4)
    tight = run(engine, *requests)
    assert [c.token_ids for c in tight] == [c.token_ids for c in roomy]
    for a, b in zip(tight, roomy, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    stats = engine.stats()
    assert 0 < stats.peak_kv_bytes <= stats.kv_budget_bytes == tokens * SLOT_BYTES


def test_the_youngest_is_preempted_and_loses_nothing(llama: CausalLM) -> None:
    (prompt,) = prompts(8)
    requests = [(prompt, free(100, seed)) for seed in range(3)]
    engine = make(llama, 256)
    tight = run(engine, *requests)
    stats = engine.stats()
    assert stats.preemptions >= 1
    assert [c.token_ids for c in tight] == [c.token_ids for c in run(make(llama), *requests)]
    assert all(len(c.token_ids) == len(c.logprobs) == len(c.versions) == 100 for c in tight)


def test_what_never_fits_is_refused_with_the_numbers(llama: CausalLM) -> None:
    engine = make(llama, 96)
    with pytest.raises(
        UserError, match=r"20 tokens with up to 90 new ones needs 128 tokens .* holds 96"
    ):
        run(engine, (prompts(20)[0], free(90)))
    with pytest.raises(UserError, match="holds 32 tokens: this model needs at least"):
        make(llama, 32)


def test_requests_are_admitted_in_order(llama: CausalLM) -> None:
    engine = make(llama, max_running=2)
    ended: list[int] = []

    async def one(i: int) -> None:
        await engine.generate(prompts(4)[0], free(5, i))
        ended.append(i)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in range(6)))

    asyncio.run(all_of_them())
    assert ended == [0, 1, 2, 3, 4, 5]
    assert engine.stats().peak_running == 2


def test_cancelled_requests_make_room_whether_running_or_waiting(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(llama, max_running=3)
    held = held_at(20)
    at_each_step(monkeypatch, held)

    async def go() -> None:
        tasks = [
            asyncio.create_task(engine.generate(p, free(50, i)))
            for i, p in enumerate(prompts(4, 4, 6, 6, 8))
        ]
        while engine.stats().peak_running < 3:
            await asyncio.sleep(0)
        for i in (0, 3):
            tasks[i].cancel()
        await turns()
        held.go.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [
            True,
            False,
            False,
            True,
            False,
        ]
        assert [len(d.token_ids) for d in done if isinstance(d, Completion)] == [50] * 3

    asyncio.run(go())
    assert engine.stats().sampled_tokens < 4 * 50


def test_a_failed_step_fails_what_ran_and_the_engine_goes_on(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(llama, max_running=2)
    (prompt,) = prompts(4)
    draw = Runner.draw
    calls = iter(range(1000))

    def broken(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return draw(*args)

    at_each_step(monkeypatch, broken)

    async def go() -> list[Completion | BaseException]:
        return await asyncio.gather(
            *(engine.generate(prompt, free(8, i)) for i in range(4)), return_exceptions=True
        )

    first, second, third, fourth = asyncio.run(go())
    for failed in (first, second):
        assert isinstance(failed, EngineError)
        assert "out of luck" in str(failed) and isinstance(failed.__cause__, RuntimeError)
    assert isinstance(third, Completion) and isinstance(fourth, Completion)
    assert run(make(llama), (prompt, free(8, 2)))[0].token_ids == third.token_ids


def test_the_engine_of_a_failed_gpu_is_lost(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other call of its process works, so a pool starts another, and a server ends."""

    def broken(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    at_each_step(monkeypatch, broken)
    with pytest.raises(EngineLostError, match="illegal memory access"):
        run(make(llama), (prompts(1)[0], free(8)))


def at_each_step(monkeypatch: pytest.MonkeyPatch, draw: Callable[..., Any]) -> None:
    """In the place of ``Runner.draw``, and no step is taken together with others."""
    monkeypatch.setattr(Runner, "several", lambda *_: None)
    monkeypatch.setattr(Runner, "draw", draw)


class held_at:
    """``Runner.draw``, which is held in its ``number``-th call until it may ``go`` on."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0
        self.draw = Runner.draw
        self.held = threading.Event()
        self.go = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            self.held.set()
            assert self.go.wait(60)
        return self.draw(*args)

    def __get__(self, owner: Runner | None, _: type[Runner]) -> Any:
        return self if owner is None else partial(self, owner)


def test_memory_that_cannot_be_taken_fails_requests_and_the_next_ones_run(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the rows of requests that start, then all memory, when it is taken back."""
    engine = make(llama, max_running=2)
    admit = KVPool.admit
    allocate = KVPool.allocate
    refused: list[str] = []

    def refuse(*_: Any) -> Any:
        refused.append("refused")
        raise MemoryError("no rows")

    async def play() -> None:
        monkeypatch.setattr(KVPool, "admit", refuse)
        monkeypatch.setattr(KVPool, "allocate", refuse)
        calls = [engine.generate(prompt, free(3)) for prompt in prompts(4, 5, 6)]
        failed = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert [type(one) for one in failed] == [EngineError] * 3 and len(refused) == 2
        monkeypatch.setattr(KVPool, "admit", admit)
        monkeypatch.setattr(KVPool, "allocate", allocate)
        with pytest.raises(EngineError):  # its failure takes the memory back
            await asyncio.wait_for(engine.generate(prompts(4)[0], free(3)), 60)
        done = await asyncio.wait_for(
            together(engine, *((prompt, free(3)) for prompt in prompts(4, 5, 6))), 60
        )
        assert [len(one.token_ids) for one in done] == [3] * 3
        await engine.close()

    asyncio.run(play())


async def turns() -> None:
    """Of the event loop, so that what was asked for is on its way to the engine."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_event_loop_does_not_wait_for_steps(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = held_at(2)
    at_each_step(monkeypatch, held)
    threads = threading.active_count()
    engine = make(llama)
    (prompt,) = prompts(4)

    async def meanwhile() -> None:
        writing = asyncio.create_task(engine.generate(prompt, free(4)))
        while not held.held.is_set():
            await asyncio.sleep(0)
        await turns()
        assert not writing.done()
        held.go.set()
        assert len((await writing).token_ids) == 4
        await engine.close()

    asyncio.run(meanwhile())
    assert threading.active_count() <= threads  # closing ends the engine's


def test_what_is_computed_together_is_the_same_in_every_run(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns each, few at a time, as a rollout has them: what follows on a completion starts at
    the same step."""
    draw = Runner.draw
    passes: list[int] = []

    def counted(*args: Any) -> Any:
        passes.append(len(args[1]))
        return draw(*args)

    at_each_step(monkeypatch, counted)

    async def episodes() -> None:
        engine = make(llama)
        slots = asyncio.Semaphore(3)

        async def episode(seed: int) -> None:
            async with slots:
                first = await asyncio.create_task(
                    engine.generate(prompts(4)[0], free(3 + seed % 5, seed))
                )
                await asyncio.sleep(0)
                await engine.generate(
                    [*prompts(4)[0], *first.token_ids, 9], free(4 + seed % 3, seed)
                )

        await asyncio.gather(*(episode(i) for i in range(9)))
        await engine.close()

    seen: list[list[int]] = []
    for _ in range(4):
        passes.clear()
        asyncio.run(episodes())
        seen.append(list(passes))
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_the_trainers_random_numbers_stay_its_own(llama: CausalLM) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run(make(llama), *[(p, free(20, i)) for i, p in enumerate(prompts(4, 5))])
    assert torch.equal(torch.get_rng_state(), before)


async def test_weights_do_not_change_within_a_step(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while they are updated nor after a request was cancelled is anything computed."""
    busy = [False]
    draw = Runner.draw

    def noted(*args: Any) -> Any:
        busy[0] = True
        try:
            time.sleep(0.01)
            return draw(*args)
        finally:
            busy[0] = False

    at_each_step(monkeypatch, noted)
    seen: list[bool] = []
    engine = make(llama, update=lambda: seen.append(busy[0]))
    (prompt,) = prompts(4)

    writing = asyncio.create_task(engine.generate(prompt, free(60)))
    for version in range(10):
        await engine.load_weights(version)
    await asyncio.sleep(0.015)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    for _ in range(10):
        seen.append(busy[0])
        await asyncio.sleep(0.003)
    assert not any(seen) and len(seen) == 20


def test_weights_that_diverged_are_an_error_and_leave_no_trace(llama: CausalLM) -> None:
    engine = make(llama)
    (prompt,) = prompts(4)
    good = run(engine, (prompt, free(6)))[0]
    norm = llama.module.base_model.norm.weight
    with torch.no_grad():
        kept = norm.clone()
        norm.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        run(engine, (prompts(5)[0], free(6)))
    with torch.no_grad():
        norm.copy_(kept)
    assert run(engine, (prompt, free(6)))[0].token_ids == good.token_ids


def test_a_closed_engine_keeps_no_prepared_weights(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even as long as nobody collects garbage: programs open and close many engines."""
    monkeypatch.setattr(DECODING, "rooms", ())
    prepared: list[weakref.ref[Any]] = []

    def prepare(*head: Any) -> Any:
        product = wide_head(*head)
        prepared.append(weakref.ref(product))
        return product

    monkeypatch.setattr(decode_model, "wide_head", prepare)
    engine = make(llama)

    async def use() -> None:
        await engine.generate([5, 6, 7], free(4))
        assert prepared[0]() is not None
        await engine.close()

    gc.disable()
    try:
        asyncio.run(use())
        assert [product() for product in prepared] == [None]
    finally:
        gc.enable()


def test_eos_comes_from_the_generation_config_and_can_be_ignored(llama: CausalLM) -> None:
    (prompt,) = prompts(4)
    written = run(make(llama), (prompt, free(20)))[0].token_ids
    eos = written[7]
    sampling = Sampling(20, seed=0)
    cut = run(make(llama, eos_token_ids=[eos]), (prompt, sampling))[0]
    assert (cut.token_ids, cut.finish_reason) == (written[: written.index(eos) + 1], "stop")
    assert end_of_sequence_ids(llama) == {2}


def test_attainable_time_by_hand(llama: CausalLM) -> None:
    """One prompt of 4 and 3 tokens: a prefill of 4, then decodes that read 5 and 6 cached
    tokens."""
    by_bytes = make(llama, limits=PeakRates(bytes_per_second=1.0, flops_per_second=1e30))
    run(by_bytes, (prompts(4)[0], free(3)))
    weights = sum(p.numel() for p in llama.module.parameters()) - 300 * 32
    assert by_bytes.stats().attainable_seconds == pytest.approx(
        3 * 4 * weights + (5 + 6) * TOKEN_BYTES
    )
    by_flops = make(llama, limits=PeakRates(bytes_per_second=1e30, flops_per_second=1.0))
    run(by_flops, (prompts(4)[0], free(3)))
    pairs = 4 * 5 // 2 + 5 + 6
    assert by_flops.stats().attainable_seconds == pytest.approx(
        2 * weights * 6 + 4 * 2 * 4 * 8 * pairs
    )
    assert make(llama).stats().attainable_seconds == 0


def test_long_prompts_are_chunked_and_short_ones_kept_whole() -> None:
    pieces = [
        Piece(CachedPrompt((0,) * n, 1, KVSpan([row])), 0, (0,) * n)
        for row, n in enumerate((3, 3, 3, 20, 2))
    ]
    batches = [
        [(p.owner.span.blocks[0], p.start, p.stop) for p in batch]
        for batch in split_pieces(pieces, 8)
    ]
    assert batches == [
        [(0, 0, 3), (1, 0, 3)],
        [(2, 0, 3)],
        [(3, 0, 8)],
        [(3, 8, 16)],
        [(3, 16, 20), (4, 0, 2)],
    ]


def test_a_bfloat16_model_is_sampled_as_its_trainer_scores_it(tmp_path: Path) -> None:
    """Few rows decode in a float32 copy, many in bfloat16; new weights reach both."""
    save_model(tmp_path)
    model = CausalLM.load(tmp_path, dtype=torch.bfloat16)
    engine = make(model, max_running=32)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        for mine, other in zip(exact.parameters(), model.module.parameters(), strict=True):
            mine.copy_(other)
    (prompt,) = prompts(6)
    for rows, tolerance in ((4, 0.03), (24, 0.06)):
        for done in run(engine, *[(prompt, free(12, i)) for i in range(rows)]):
            assert done.logprobs == pytest.approx(
                scores(exact, prompt, done.token_ids), abs=tolerance
            )
    for parameters in (exact.parameters(), model.module.parameters()):
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.5)
    asyncio.run(engine.load_weights(1))
    for rows, tolerance in ((1, 0.03), (24, 0.06)):
        for done in run(engine, *[(prompt, free(12, i)) for i in range(rows)]):
            assert done.logprobs == pytest.approx(
                scores(exact, prompt, done.token_ids), abs=tolerance
            )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "qwen3", head_dim=16)
    requests = [(p, Sampling(20, temperature=0.0)) for p in prompts(3, 3, 9)]
    engines = [make(CausalLM.load(tmp_path, device=d), 8192) for d in ("cpu", "cuda")]
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # and not TF32
    cpu, cuda = (run(engine, *requests) for engine in engines)
    assert [c.token_ids for c in cpu] == [c.token_ids for c in cuda]
