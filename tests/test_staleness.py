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
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny import save_model
from tiny_runs import rl_settings, sums, write_lines
from tunesmith import assembly
from tunesmith.engines.fake import FakeEngine
from tunesmith.environments.base import Generate
from tunesmith.errors import ConfigError
from tunesmith.loop.collect import Collector
from tunesmith.loop.gate import Gate
from tunesmith.loop.staleness import Bound
from tunesmith.monitor.metrics import read_metrics
from tunesmith.types import Completion, Rollout, RolloutGroup, Sampling, Status, Task


def test_the_bound_by_hand() -> None:
    bound = Bound(batch_size=2, max_staleness=1)
    assert bound.room(version=0, batches=0, alive=0) == 4
    assert bound.room(version=0, batches=1, alive=2) == 0
    assert bound.room(version=1, batches=1, alive=2) == 2
    assert bound.newest_start(version=3, starts=[2, 2, 3], slots=2) == 2
    assert bound.newest_start(version=3, starts=[2, 3, 3], slots=2) == 3
    assert bound.newest_start(version=3, starts=[2, 3, 3], slots=1) == 2
    assert Bound(2, 0).room(version=5, batches=5, alive=0) == 2


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 2**32), st.floats(0, 0.5))
def test_no_group_is_ever_too_old_and_none_is_dropped(size: int, limit: int, seed: int, filtered: float) -> None:
    """Groups end in any order, some are thrown away, and every batch is full."""
    draw, bound = random.Random(seed), Bound(size, limit)
    playing: list[int] = []
    waiting: list[int] = []
    for version in range(12):
        batch: list[int] = []
        while len(batch) < size:
            batches = version
            alive = len(playing) + len(waiting) + len(batch)
            playing += [version] * bound.room(version, batches, alive)
            newest = bound.newest_start(version, [*playing, *waiting], size - len(batch))
            fitting = [start for start in waiting if start <= newest]
            if fitting and draw.random() < 0.7:
                chosen = draw.choice(fitting)
                waiting.remove(chosen)
                batch.append(chosen)
            elif playing:
                ended = playing.pop(draw.randrange(len(playing)))
                if draw.random() >= filtered:
                    waiting.append(ended)
            else:
                assert fitting, "nothing is played and nothing may be taken"
        assert all(version - start <= limit for start in batch)


def asked(count: int, **changes: Any) -> Sampling:
    return replace(Sampling(max_new_tokens=count, ignore_eos=True, seed=3), **changes)


def test_an_interrupted_completion_goes_on_from_its_tokens() -> None:
    async def run() -> None:
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
        done = await asyncio.wait_for(running, 5)
        assert len(done.token_ids) == len(done.logprobs) == 30 and done.finish_reason == "length"
        assert sorted(set(done.versions)) == [4, 5] and done.versions == sorted(done.versions)

    asyncio.run(run())


def test_a_stop_string_across_an_interruption_is_found() -> None:
    async def run() -> None:
        script = [7, 7, 8, 9, 9, 9, 9, 9]
        engine = FakeEngine(lambda prompt, _: script[len(prompt) - 1 :])
        gate = Gate(engine, partial=True)
        await gate.load_weights(0)
        running = asyncio.create_task(gate.generate([1], asked(8, stop=("8 9 9",))))
        for _ in range(4):  # the 8 is written, what follows is not
            await asyncio.sleep(0)
        await gate.hold()
        gate.release()
        done = await asyncio.wait_for(running, 5)
        assert done.token_ids == [7, 7, 8, 9, 9] and done.finish_reason == "stop"

    asyncio.run(run())


def test_without_partial_new_weights_wait_for_what_is_in_flight() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_gate_held_again_before_anybody_woke_lets_nobody_in() -> None:
    async def run() -> None:
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
        await asyncio.wait_for(asking, 5)

    asyncio.run(run())


class Served:
    """Asks in a task that the first rollout began, as a server does that is opened for all of them."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[Generate, list[int], asyncio.Future[Completion]]] = asyncio.Queue()
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


class Unscored:
    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None: ...


def play(gate: Gate, environment: Any, timeout: float) -> asyncio.Task[list[RolloutGroup]]:
    collector = Collector(gate, Unscored(), {"single_turn": environment}, str, timeout)
    return asyncio.create_task(collector.collect([Task("t", "p", (1, 2))], asked(3), 1, 0))


def test_a_hold_is_none_of_the_time_of_the_rollout_that_asks_in_whatever_task() -> None:
    async def run() -> None:
        gate, served = Gate(FakeEngine(), partial=True), Served()
        await play(gate, served, 5.0)
        await gate.hold()
        asking = play(gate, served, 0.2)
        await asyncio.sleep(0.4)
        gate.release()
        [group] = await asking
        assert group.rollouts[0].status is Status.OK, group.rollouts[0].error

    asyncio.run(run())


def test_a_call_given_up_in_a_hold_leaves_the_rollout_its_deadline() -> None:
    async def run() -> None:
        gate = Gate(FakeEngine(), partial=True)
        await gate.hold()
        [group] = await asyncio.wait_for(play(gate, Impatient(), 0.05), 30)
        assert group.rollouts[0].status is Status.TIMED_OUT

    asyncio.run(run())


def test_a_request_that_outlives_its_rollout_is_held_like_any_other() -> None:
    async def run() -> None:
        gate, left = Gate(FakeEngine(), partial=True), list[Generate]()

        class Leaves:
            async def play(self, rollout: Rollout, generate: Generate) -> None:
                rollout.act(await generate(rollout.token_ids))
                left.append(generate)

        await play(gate, Leaves(), 5.0)
        await gate.hold()
        asking = asyncio.create_task(left[0]([1]))
        await asyncio.sleep(0)
        gate.release()
        assert len((await asyncio.wait_for(asking, 5)).token_ids) == 3

    asyncio.run(run())


RUNS: dict[str, dict[str, Any]] = {
    "one behind": {"system__engine_process": True, "rollout__max_staleness": 1},
    "under way": {
        "system__engine_process": True, "rollout__max_staleness": 2, "rollout__partial": True,
        "rollout__over_generation": 2.0,
    },
    "shared": {"rollout__max_staleness": 1, "rollout__partial": True, "rollout__over_generation": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_play_ahead(name: str, tmp_path: Path) -> None:
    """All steps are taken with full batches, no token is too old, and the correction is on."""
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(5, 6))
    settings = RUNS[name] | {"train__steps": 5, "data__eval": str(held_out), "eval__every": 2}
    outcome = assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), "run", **settings))
    lines = [line for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "optimizer_steps" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    oldest = [line["staleness/max"] for line in lines]
    assert max(oldest) <= settings["rollout__max_staleness"]
    assert max(oldest) > 0
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
def test_settings_that_would_do_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **settings))


@pytest.mark.parametrize("apart", [False, True], ids=["inside", "apart"])
def test_taking_turns_on_a_device_changes_nothing(tmp_path: Path, apart: bool) -> None:
    """The engine's memory is given back before every training step; the curve is the same."""
    model, changed = save_model(tmp_path / "model"), {"system__engine_process": apart}
    plain = assembly.run_rl(None, rl_settings(tmp_path, model, "plain", **changed))
    turns = assembly.run_rl(None, rl_settings(tmp_path, model, "turns", system__hybrid=True, **changed))
    losses = [
        [line["loss"] for line in read_metrics(outcome.run_dir / "metrics.jsonl") if "loss" in line]
        for outcome in (plain, turns)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 3


def test_turns_and_working_at_once_exclude_each_other(tmp_path: Path) -> None:
    changed = {"system__engine_process": True, "rollout__max_staleness": 1, "system__hybrid": True}
    with pytest.raises(ConfigError, match="leave one of the two out"):
        assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **changed))


AGENT = """
async def answer(client, prompt):
    await client.chat.completions.create(messages=[{"role": "user", "content": prompt}])
"""


@pytest.mark.parametrize("partial", [False, True])
def test_an_evaluation_has_turns_of_its_own(tmp_path: Path, partial: bool) -> None:
    """Where one episode is played at a time, and the one in progress is held."""
    (tmp_path / "agent.py").write_text(AGENT)
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(3, 6))
    changed = {
        "system__engine_process": True, "rollout__max_staleness": 1, "rollout__partial": partial,
        "environment__path": str(tmp_path / "agent.py") + ":answer", "environment__concurrency": 1, "data__chat": True,
        "data__eval": str(held_out), "eval__every": 1, "train__steps": 3,
    }  # fmt: skip
    outcome = assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **changed))
    assert len(outcome.evaluations) == 4


def test_a_short_epoch_makes_no_short_batches(tmp_path: Path) -> None:
    """As many tasks as a step takes: every step is full, and nothing is older than it may be."""
    changed = {"rollout__prompts_per_step": 12, "rollout__group_size": 2, "train__steps": 6, "monitor__samples": 99}
    settings = rl_settings(tmp_path, save_model(tmp_path / "model"), **RUNS["one behind"], **changed)
    run = assembly.run_rl(None, settings).run_dir
    assert max(line["staleness/max"] for line in read_metrics(run / "metrics.jsonl")) <= 1
    steps = Counter(json.loads(line)["step"] for line in (run / "rollouts.jsonl").read_text().splitlines())
    assert steps == dict.fromkeys(range(1, 7), 12 * 2)
