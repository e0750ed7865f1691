"""Playing ahead: the bound on staleness, the gate before the engine, and whole runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clocks import passing
from tests.support.fake_engine import FakeEngine
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.errors import ConfigError, RewardError
from tunesmith.learn.environments.base import Generate
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.engines.base import EngineStats, add_stats
from tunesmith.run.loop import rollouts
from tunesmith.run.loop.buffer import Buffer, Started
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.gate import Gate
from tunesmith.run.loop.groups import engine_metrics
from tunesmith.run.loop.rollouts import AsyncRollouts, SyncRollouts
from tunesmith.types import Completion, Rollout, RolloutGroup, Sampling, Status, Task


def group() -> RolloutGroup:
    return RolloutGroup(Task("t", "p", (1, 2)), [])


def buffer(size: int, staleness: int, *, enough: int = 10**6, left: int = 10**6) -> Buffer:
    most = 10**6
    return Buffer(size, staleness, max_playing=most, max_waiting=most, enough=enough, left=left)


def test_a_buffer_by_hand() -> None:
    made = buffer(2, 1)
    assert made.room(0) == 4
    first, second, third, fourth = (made.start(0) for _ in range(4))
    assert made.room(0) == 0 and made.playing == 4
    groups = [group() for _ in range(4)]
    made.put(third, groups[2], keep=True)
    assert made.take(0) is None, "half a batch"
    made.put(fourth, groups[3], keep=True)
    assert made.take(0) == ([groups[2], groups[3]], [])
    assert made.room(0) == 0 and made.room(1) == 2
    later = [made.start(1), made.start(1)]
    for started in later:
        made.put(started, group(), keep=True)
    assert made.take(1) is None, "the two that started at version 0 must be in this batch"
    made.put(first, groups[0], keep=False)
    made.put(second, groups[1], keep=True)
    taken = made.take(1)
    assert (
        taken is not None
        and taken[0][0] is groups[1]
        and len(taken[0]) == 2
        and taken[1] == [groups[0]]
    )
    assert made.waiting == 1


def test_a_buffer_that_rejects_everything_gives_an_empty_batch() -> None:
    made = buffer(2, 1, enough=5)
    for _ in range(5):
        assert made.room(0) and made.take(0) is None
        made.put(made.start(0), group(), keep=False)
    assert made.room(0) == 0
    batch, rejected = made.take(0) or (None, [])
    assert batch == [] and len(rejected) == 5 and made.room(1) == 4


def test_a_buffer_limits_those_that_play_and_those_that_wait() -> None:
    made = Buffer(2, 5, max_playing=3, max_waiting=2, enough=9, left=99)
    assert made.room(0) == 3
    playing = [made.start(0) for _ in range(3)]
    assert made.room(0) == 0
    for started in playing[:2]:
        made.put(started, group(), keep=True)
    assert made.room(0) == 0 and made.take(0) is not None and made.room(0) == 2


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 2**32),
    st.floats(0, 0.5),
    st.integers(0, 3),
)
def test_no_group_is_ever_too_old_and_none_is_dropped(
    size: int, limit: int, seed: int, filtered: float, short: int
) -> None:
    """Groups end in any order, some are rejected, and every batch is full but perhaps the last;
    none plays or waits after it."""
    draw = random.Random(seed)
    short = min(short, size - 1)
    made = buffer(size, limit, left=12 * size - short)
    playing: list[Started] = []
    waiting: dict[int, Started] = {}
    for version in range(12):
        while (taken := made.take(version)) is None:
            playing += [made.start(version) for _ in range(made.room(version))]
            assert playing, "nothing plays, and the batch is incomplete"
            for _ in range(draw.randint(1, len(playing))):
                started = playing.pop(draw.randrange(len(playing)))
                played = group()
                keep = draw.random() >= filtered
                made.put(started, played, keep=keep)
                if keep:
                    waiting[id(played)] = started
        batch, _ = taken
        starts = [waiting.pop(id(played)).version for played in batch]
        assert len(batch) == size - short * (version == 11)
        assert all(version - start <= limit for start in starts)
        assert made.waiting == len(waiting) and made.playing == len(playing)
    assert not playing and not waiting and not made.room(12)


def test_the_last_batch_waits_for_all_that_play_after_enough_were_tried() -> None:
    made = buffer(2, 1, enough=2, left=2)
    first, second = made.start(0), made.start(0)
    assert made.room(0) == 0, "no later batch takes another one"
    made.put(first, group(), keep=False)
    third = made.start(0)
    made.put(second, group(), keep=False)
    assert made.take(0) is None and made.room(0) == 0, "no later batch takes the third"
    last = group()
    made.put(third, last, keep=True)
    assert (made.take(0) or ([],))[0] == [last] and made.left == 0


def asked(count: int, **changes: Any) -> Sampling:
    return replace(Sampling(max_new_tokens=count, ignore_eos=True, seed=3), **changes)


async def test_an_interrupted_completion_goes_on_from_its_tokens() -> None:
    gate = Gate(FakeEngine(), partial=True)
    await gate.load_weights(4)
    running = asyncio.create_task(gate.generate([1, 2], asked(30)))
    for _ in range(10):
        await asyncio.sleep(0)
    await gate.hold()
    assert not running.done()
    await gate.load_weights(5)
    await asyncio.sleep(0)
    assert not running.done()
    gate.release()
    done = await asyncio.wait_for(running, 60)
    assert len(done.token_ids) == len(done.logprobs) == 30 and done.finish_reason == "length"
    assert sorted(set(done.versions)) == [4, 5] and done.versions == sorted(done.versions)


async def test_a_stop_string_across_an_interruption_is_found() -> None:
    script = [7, 7, 8, 9, 9, 9, 9, 9]
    engine = FakeEngine(lambda prompt, _: script[len(prompt) - 1 :])
    gate = Gate(engine, partial=True)
    await gate.load_weights(0)
    running = asyncio.create_task(gate.generate([1], asked(8, stop=("8 9 9",))))
    for _ in range(4):  # the 8 is written, what follows is not
        await asyncio.sleep(0)
    await gate.hold()
    gate.release()
    done = await asyncio.wait_for(running, 60)
    assert done.token_ids == [7, 7, 8, 9, 9] and done.finish_reason == "stop"


async def test_without_partial_new_weights_wait_for_what_is_in_flight() -> None:
    gate = Gate(FakeEngine(), partial=False)
    await gate.load_weights(0)
    gate.release()
    first = asyncio.create_task(gate.generate([1], asked(20)))
    await asyncio.sleep(0)
    loading = asyncio.create_task(gate.load_weights(1))
    await asyncio.sleep(0)
    second = asyncio.create_task(gate.generate([2], asked(3)))
    await loading
    assert set((await first).versions) == {0}
    assert not second.done()
    gate.release()
    assert set((await second).versions) == {1}


async def test_a_gate_held_again_before_anybody_woke_lets_nobody_in() -> None:
    gate = Gate(FakeEngine(), partial=False)
    await gate.hold()
    asking = asyncio.create_task(gate.generate([1], asked(3)))
    await asyncio.sleep(0)
    gate.release()
    await gate.hold()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not asking.done() and gate.engine.stats().peak_running == 0
    gate.release()
    await asyncio.wait_for(asking, 60)


class Served:
    """Asks in a task that the first rollout began, as a server does that is opened for all of
    them."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[Generate, list[int], asyncio.Future[Completion]]] = (
            asyncio.Queue()
        )
        self.server: asyncio.Task[None] | None = None

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        self.server = self.server or asyncio.create_task(self._serve())
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((generate, rollout.token_ids, answer))
        rollout.act(await answer)

    async def _serve(self) -> None:
        while True:
            generate, prompt, answer = await self.asked.get()
            try:
                answer.set_result(await generate(prompt))
            except Exception as error:
                answer.set_exception(error)


class Impatient:
    """Gives a call up, and does not end."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(generate(rollout.token_ids), 0.01)
        await asyncio.sleep(3600)


def play(gate: Gate, environment: Any, timeout: float) -> asyncio.Task[list[RolloutGroup]]:
    collector = Collector(gate.generate, None, {"single_turn": environment}, str, timeout)
    return asyncio.create_task(collector.collect([Task("t", "p", (1, 2))], asked(3), 1, 0))


async def test_a_hold_is_none_of_the_time_of_the_rollout_that_asks_in_whatever_task() -> None:
    gate = Gate(FakeEngine(), partial=True)
    served = Served()
    pass_time = passing()
    await play(gate, served, 60.0)
    await gate.hold()
    asking = play(gate, served, 60.0)
    for _ in range(100):
        await asyncio.sleep(0)
    pass_time(1000.0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not asking.done()
    gate.release()
    [group] = await asking
    assert group.rollouts[0].status is Status.OK, group.rollouts[0].error


async def test_a_call_given_up_in_a_hold_leaves_the_rollout_its_deadline() -> None:
    gate = Gate(FakeEngine(), partial=True)
    await gate.hold()
    [group] = await asyncio.wait_for(play(gate, Impatient(), 0.05), 60)
    assert group.rollouts[0].status is Status.TIMED_OUT


async def test_a_request_that_outlives_its_rollout_is_held_like_any_other() -> None:
    gate = Gate(FakeEngine(), partial=True)
    left = list[Generate]()

    class Leaves:
        async def play(self, rollout: Rollout, generate: Generate) -> None:
            rollout.act(await generate(rollout.token_ids))
            left.append(generate)

    await play(gate, Leaves(), 60.0)
    await gate.hold()
    asking = asyncio.create_task(left[0]([1]))
    await asyncio.sleep(0)
    gate.release()
    assert len((await asyncio.wait_for(asking, 60)).token_ids) == 3


def test_a_run_that_plays_ahead(tmp_path: Path) -> None:
    """All steps are taken with full batches, no token is too old, and the correction is on."""
    changed = {
        "rollout__max_staleness": 1,
        "rollout__partial": True,
        "rollout__over_generation": 2.0,
        "train__steps": 5,
    }
    outcome = assembly.run_rl(
        None, rl_settings(tmp_path, save_model(tmp_path / "model"), "run", **changed)
    )
    lines = [
        line
        for line in read_metrics(outcome.run_dir / "metrics.jsonl")
        if "optimizer_steps" in line
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["staleness/max"] for line in lines) == 1
    resolved = (outcome.run_dir / "config.toml").read_text()
    assert 'correction = "token_truncate"' in resolved and "decoupled = true" in resolved


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout__partial": True}, "max_staleness = 0"),
        ({"rollout__over_generation": 1.5}, "max_staleness = 0"),
        ({"rollout__max_staleness": 1}, "rollout.partial = true"),
        ({"rollout__max_staleness": 1, "rollout__partial": True}, "gains nothing"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **settings))


@pytest.mark.more
def test_taking_turns_on_a_device_changes_nothing(tmp_path: Path) -> None:
    """The engine's memory is given back before every training step; the curve is the same."""
    model = save_model(tmp_path / "model")
    plain = assembly.run_rl(None, rl_settings(tmp_path, model, "plain"))
    turns = assembly.run_rl(None, rl_settings(tmp_path, model, "turns", system__hybrid=True))
    losses = [
        [line["loss"] for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "loss" in line]
        for outcome in (plain, turns)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 3


def test_turns_and_working_at_once_exclude_each_other(tmp_path: Path) -> None:
    changed = {"system__engine_process": True, "rollout__max_staleness": 1, "system__hybrid": True}
    with pytest.raises(ConfigError, match="leave one of the two out"):
        assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **changed))


@pytest.mark.slow
def test_a_short_epoch_makes_no_short_batches(tmp_path: Path) -> None:
    """As many tasks as a step takes: every step is full, and nothing is older than it may be."""
    changed: dict[str, Any] = {"system__engine_process": True, "rollout__max_staleness": 1}
    changed |= {
        "rollout__prompts_per_step": 12,
        "rollout__group_size": 2,
        "train__steps": 6,
        "monitor__samples": 99,
    }
    settings = rl_settings(tmp_path, save_model(tmp_path / "model"), **changed)
    run = assembly.run_rl(None, settings).run_dir
    assert max(line["staleness/max"] for line in read_metrics(run / "metrics.jsonl")) <= 1
    steps = Counter(
        json.loads(line)["step"] for line in (run / "rollouts.jsonl").read_text().splitlines()
    )
    assert steps == dict.fromkeys(range(1, 7), 12 * 2)


async def test_an_interruption_draws_no_token_twice() -> None:
    """However short the time between two holds and however long the stop string, a completion goes
    on."""

    class Interrupted(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            asked_for.append((list(prompt_ids), sampling.continued, sampling.max_new_tokens))
            return Completion(
                [len(prompt_ids)] * 2, [0.0] * 2, [0] * 2, "stop" if len(asked_for) > 2 else "abort"
            )

    asked_for: list[tuple[list[int], int, int]] = []
    done = await Gate(Interrupted(), partial=True).generate(
        [9], asked(8, stop=("a stop string of many bytes",))
    )
    assert asked_for == [([9], 0, 8), ([9, 1, 1], 2, 6), ([9, 1, 1, 3, 3], 4, 4)]
    assert done.token_ids == [1, 1, 3, 3, 5, 5]


async def test_a_step_counts_the_bytes_of_the_sync_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which has ended when the step's groups are played; an evaluation's are not the step's."""

    class Counting(FakeEngine):
        counted = EngineStats()

        def stats(self) -> EngineStats:
            return self.counted

        async def load_weights(self, version: int) -> None:
            more = EngineStats(sync_bytes=version, sync_seconds=2.0 * version)
            self.counted = add_stats(self.counted, more)

    async def play(*_: object) -> list[Any]:
        engine.counted = add_stats(engine.counted, EngineStats(sampled_tokens=5))
        return [SimpleNamespace(task=None)]

    engine = Counting()
    fakes: dict[str, Any] = {
        "play": play,
        "prompts_of": lambda *_: 1,
        "update_trainer_state": lambda *_: None,
        "check_failures": lambda *_: None,
        "select_learnable": lambda _, groups: groups,
        "step_metrics": lambda *given: engine_metrics(given[-1]),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(rollouts, name, fake)
    said = SimpleNamespace(rollout=SimpleNamespace(oversample=1.0))
    plan = SimpleNamespace(devices=SimpleNamespace(hybrid=False), said=said, training=None)
    parts: Any = SimpleNamespace(engine=engine, plan=plan, tasks=MagicMock(), collector=None)
    parts.tasks.__len__.return_value = 1
    session: Any = SimpleNamespace(step=3)
    source = SyncRollouts(parts, session)
    for step, seen in ((3, 3.0), (4, 4.0)):
        session.step = step
        await source.sync()
        _, metrics = await source.next()
        assert (metrics["sync_bytes"], metrics["sync_bytes_per_second"]) == (seen, 0.5)
        assert metrics["sampled_tokens"] == 5.0
        async with source.evaluating():
            pass


async def test_an_error_while_the_policy_trains_ends_the_run_though_a_batch_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(*_: object) -> list[RolloutGroup]:
        played.append(1)
        if len(played) > 1:
            await trains.wait()
        return [group()]

    def check(*_: object) -> None:
        if trains.is_set():
            raise RewardError("all failed")

    played: list[int] = []
    trains = asyncio.Event()
    fakes: dict[str, Any] = {
        "play": play,
        "prompts_left": lambda *_: 9,
        "check_failures": check,
        "select_learnable": lambda _, groups: groups,
        "step_metrics": lambda *_: {},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(rollouts, name, fake)
    rollout = SimpleNamespace(max_staleness=1, over_generation=1.0)
    plan = SimpleNamespace(
        said=SimpleNamespace(rollout=rollout),
        training=SimpleNamespace(prompts=1),
        sampling=SimpleNamespace(queue=2),
    )
    tasks = MagicMock()
    tasks.__len__.return_value = 9
    tasks.next_batch.side_effect = lambda count: [None] * count
    engine = SimpleNamespace(version=0, stats=EngineStats)
    parts: Any = SimpleNamespace(plan=plan, tasks=tasks, engine=engine, gate=object())
    session: Any = MagicMock(step=0)
    source = AsyncRollouts(parts, session)
    batch, _ = await source.next()
    assert len(batch) == 1
    trains.set()
    while not source.buffer.waiting:
        await asyncio.sleep(0)
    engine.version = 1
    with pytest.raises(RewardError, match="all failed"):
        await source.next()
    await source.close()
