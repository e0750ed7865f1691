"""What every rollout engine must do. A test module makes a ``Subject`` per engine and calls each
check.

A check takes a ``Subject`` and is a coroutine function named ``check_*``; ``CHECKS`` lists them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tunesmith.errors import EngineError, UserError
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.types import Completion, Sampling

PROMPT = [11, 12, 13, 14]
FREE = Sampling(max_new_tokens=12, ignore_eos=True, seed=5)


@dataclass
class Subject:
    """An engine under test and what the checks must know of it."""

    engine: RolloutEngine
    decode: Callable[[Sequence[int]], str]
    score: Callable[[Sequence[int], Sequence[int]], list[float]] | None = None
    """Log-probabilities of a completion after a prompt at temperature 1; None where nothing can
    tell."""
    context: int = 64
    """Longest prompt and completion together."""

    async def write(self, sampling: Sampling = FREE, prompt: Sequence[int] = PROMPT) -> Completion:
        return await self.engine.generate(prompt, sampling)


async def check_lists_have_one_entry_per_token(s: Subject) -> None:
    done = await s.write()
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 12
    assert done.finish_reason == "length"
    assert all(p <= 0 for p in done.logprobs)


async def check_seed_decides(s: Subject) -> None:
    first, again, other, unseeded, fresh = await asyncio.gather(
        s.write(),
        s.write(),
        s.write(replace(FREE, seed=6)),
        s.write(replace(FREE, seed=None)),
        s.write(replace(FREE, seed=None)),
    )
    assert first.token_ids == again.token_ids
    assert len({tuple(c.token_ids) for c in (first, other, unseeded, fresh)}) == 4


async def check_company_does_not_matter(s: Subject) -> None:
    alone = await s.write()
    crowd = [
        s.write(replace(FREE, seed=i, max_new_tokens=3 + i), [20 + i % 3] * (3 + i))
        for i in range(9)
    ]
    among, *_ = await asyncio.gather(s.write(), *crowd)
    assert among.token_ids == alone.token_ids
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


async def check_greedy_ignores_the_seed(s: Subject) -> None:
    greedy = replace(FREE, temperature=0.0)
    one, two = await asyncio.gather(s.write(greedy), s.write(replace(greedy, seed=9)))
    assert one.token_ids == two.token_ids


async def check_stop_token(s: Subject) -> None:
    free = await s.write()
    stop = free.token_ids[6]
    cut = await s.write(replace(FREE, stop_token_ids=(stop,)))
    end = free.token_ids.index(stop) + 1
    assert cut.token_ids == free.token_ids[:end]
    assert cut.finish_reason == "stop"


async def check_stop_string_across_tokens(s: Subject) -> None:
    free = await s.write()
    whole = re.findall("[^\ufffd]+", s.decode(free.token_ids[2:]))
    stop = max(whole, key=len)
    end = next(n for n in range(1, 13) if stop in s.decode(free.token_ids[:n]))
    cut = await s.write(replace(FREE, stop=("never there", stop)))
    assert cut.token_ids == free.token_ids[:end]
    assert cut.finish_reason == "stop"


async def check_stop_string_that_began_before_an_interruption(s: Subject) -> None:
    clean = [token for token in range(5, 200) if "\ufffd" not in s.decode([token])][:2]
    for seed in range(100):
        free = await s.write(replace(FREE, seed=seed), [*PROMPT, *clean])
        stop = s.decode([*clean, *free.token_ids[:2]])
        if "\ufffd" not in stop and stop not in s.decode(free.token_ids):
            break
    else:
        raise AssertionError("no completion begins with characters")
    ends = replace(FREE, seed=seed, stop=("never there, and longer than the completion", stop))
    new = await s.write(ends, [*PROMPT, *clean])
    assert new.token_ids == free.token_ids, (
        "in a new completion the prompt is no part of a stop string"
    )
    end = next(n for n in range(1, 3) if stop in s.decode([*clean, *free.token_ids[:n]]))
    on = await s.write(replace(ends, continued=2), [*PROMPT, *clean])
    assert on.token_ids == free.token_ids[:end] and on.finish_reason == "stop"
    assert len(on.logprobs) == len(on.versions) == end


async def check_nothing_ends_too_early(s: Subject) -> None:
    free = await s.write()
    text = s.decode(free.token_ids[:3])
    stop = free.token_ids[3]
    ends = replace(FREE, min_new_tokens=7, stop_token_ids=(stop,), max_new_tokens=40)
    try:
        done = await s.write(ends)
    except UserError as refused:  # by a server that cannot do it as transformers does
        assert "min_new_tokens" in str(refused)
        return
    assert stop not in done.token_ids[:7] and done.token_ids[:3] == free.token_ids[:3]
    assert all(p <= 0 for p in done.logprobs)
    assert (
        await s.write(replace(FREE, min_new_tokens=12, stop=(text,)))
    ).token_ids == free.token_ids


async def check_context_limit_ends_with_length(s: Subject) -> None:
    prompt = [21] * (s.context - 3)
    done = await s.write(replace(FREE, max_new_tokens=50), prompt)
    assert (len(done.token_ids), done.finish_reason) == (3, "length")


async def check_bad_requests_are_refused(s: Subject) -> None:
    bad: list[Awaitable[Completion]] = [
        s.write(prompt=[]),
        s.write(prompt=[21] * s.context),
        s.write(replace(FREE, max_new_tokens=0)),
        s.write(replace(FREE, temperature=-1.0)),
        s.write(replace(FREE, top_p=0.0)),
        s.write(replace(FREE, top_k=-1)),
        s.write(replace(FREE, min_p=1.0)),
        s.write(replace(FREE, repetition_penalty=0.0)),
        s.write(replace(FREE, min_new_tokens=-1)),
        s.write(replace(FREE, min_new_tokens=13)),
        s.write(replace(FREE, stop=("",))),
    ]
    for result in await asyncio.gather(*bad, return_exceptions=True):
        assert isinstance(result, UserError)


async def check_extreme_settings_harm_nobody(s: Subject) -> None:
    """Each is refused, or computed as any other; requests beside it never fail for it."""
    extremes: list[dict[str, Any]] = [
        {"seed": 2**70},
        {"seed": -(2**70)},
        {"top_k": 10**30},
        {"temperature": 1e-300},
        {"temperature": 10**400},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
    ]
    alone = await s.write()
    beside, *done = await asyncio.gather(
        s.write(), *(s.write(replace(FREE, **each)) for each in extremes), return_exceptions=True
    )
    assert isinstance(beside, Completion), beside
    assert beside.token_ids == alone.token_ids
    for one in done:
        written = len(one.token_ids) if isinstance(one, Completion) else 0
        assert isinstance(one, UserError) or written == 12, one


async def check_logprobs_are_the_scorers(s: Subject) -> None:
    if s.score is None:
        return
    for sampling in (FREE, replace(FREE, temperature=0.0)):
        done = await s.write(sampling)
        assert done.logprobs == pytest.approx(s.score(PROMPT, done.token_ids), abs=1e-4)


async def check_short_ones_are_delivered_while_long_ones_run(s: Subject) -> None:
    ended: list[int] = []

    async def write(count: int) -> None:
        ended.append(len((await s.write(replace(FREE, max_new_tokens=count))).token_ids))

    long = s.context - 14
    await asyncio.gather(write(long), write(2))
    assert ended == [2, long]


async def check_abort(s: Subject) -> None:
    kept, dropped = (
        asyncio.create_task(s.write(replace(FREE, max_new_tokens=30))) for _ in range(2)
    )
    for _ in range(5):
        await asyncio.sleep(0)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    assert len((await kept).token_ids) == 30
    assert (await s.write()).finish_reason == "length"


async def check_interrupt(s: Subject) -> None:
    """What was written so far is handed over, and can be gone on from."""
    alone = await s.write(replace(FREE, max_new_tokens=40, temperature=0.0))
    running = [
        asyncio.create_task(s.write(replace(FREE, max_new_tokens=40, temperature=0.0)))
        for _ in range(3)
    ]
    short = asyncio.create_task(s.write(replace(FREE, max_new_tokens=2)))
    await short
    await s.engine.interrupt()
    for done in await asyncio.wait_for(asyncio.gather(*running), 300):
        assert len(done.token_ids) == len(done.logprobs) == len(done.versions)
        if done.finish_reason == "abort":  # an engine may have been faster
            assert 0 <= len(done.token_ids) < 40
            assert done.token_ids == alone.token_ids[: len(done.token_ids)]
    again = await s.write(replace(FREE, max_new_tokens=40, temperature=0.0))
    assert again.token_ids == alone.token_ids and again.finish_reason == "length"


async def check_versions(s: Subject) -> None:
    await s.engine.load_weights(3)
    assert s.engine.version == 3
    assert (await s.write()).versions == [3] * 12


async def check_new_weights_with_requests_in_flight(s: Subject) -> None:
    """Within a few tries the new weights come while some tokens are written and others are not."""
    seen: list[set[int]] = []
    for attempt in range(200):
        old = 2 * attempt + 7
        new = 2 * attempt + 8
        await s.engine.load_weights(old)
        running = asyncio.create_task(s.write(replace(FREE, max_new_tokens=s.context - 14)))
        # A tiny model here writes for less than a millisecond, an engine elsewhere for longer.
        for _ in range(2 * attempt if attempt < 100 else 6):
            await asyncio.sleep(0 if attempt < 100 else 0.0005 * (attempt % 40))
        await s.engine.load_weights(new)
        versions = (await running).versions
        assert versions == sorted(versions)
        seen.append(set(versions))
        if seen[-1] == {old, new}:
            return
    raise AssertionError(f"weights never changed in the middle of a completion: {seen}")


async def check_stats_only_rise(s: Subject) -> None:
    before = s.engine.stats()
    await asyncio.gather(s.write(), s.write())
    after = s.engine.stats()
    assert after.since(before).sampled_tokens == 24 and after.peak_running >= 2
    assert s.engine.stats() == after, "reading changes nothing"


async def check_sleep_and_wake(s: Subject) -> None:
    before = await s.write()
    await s.engine.sleep()
    with pytest.raises(EngineError):
        await s.write()
    await s.engine.wake()
    assert (await s.write()).token_ids == before.token_ids


async def check_new_weights_while_asleep(s: Subject) -> None:
    before = await s.write()
    for loads_asleep in (True, False):
        await s.engine.sleep(2)
        if loads_asleep:
            await s.engine.load_weights(4)
        await s.engine.wake()
        if not loads_asleep:
            await s.engine.load_weights(4)
        after = await s.write()
        assert after.token_ids == before.token_ids and after.versions == [4] * 12


async def check_sleep_refuses_while_running(s: Subject) -> None:
    """A completion may have ended before an engine in another process is asked: then once more."""
    for _ in range(50):
        running = asyncio.create_task(s.write(replace(FREE, max_new_tokens=s.context - 14)))
        for _ in range(3):
            await asyncio.sleep(0)
        try:
            await s.engine.sleep()
        except EngineError:
            await running
            return
        assert running.done()
        await s.engine.wake()
    raise AssertionError("it sleeps while a completion is being written")


async def check_close_fails_what_is_in_flight(s: Subject) -> None:
    await s.write()
    running = asyncio.create_task(s.write(replace(FREE, max_new_tokens=s.context - 14)))
    for _ in range(3):
        await asyncio.sleep(0)
    await s.engine.close()
    [ended] = await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 300)
    # One in another process may have written all before it was asked to close.
    assert isinstance(ended, EngineError) or len(ended.token_ids) == s.context - 14
    with pytest.raises(EngineError):
        await s.write()


CHECKS: list[Callable[[Subject], Awaitable[None]]] = [
    check for name, check in sorted(globals().items()) if name.startswith("check_")
]
