"""A run tells where its time went: metrics of every step, traces, and who waits when nothing
moves."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT
from tests.support.fake_engine import FakeEngine, numbers
from tests.support.tiny_runs import rl_settings, sft_settings, sums, write_lines
from tests.support.traces import check_trace
from tunesmith.errors import ConfigError, EngineError
from tunesmith.learn.environments.base import SingleTurn
from tunesmith.records.metrics import read_metrics
from tunesmith.records.timeline import REWARD, TRAINER, Span, Timeline
from tunesmith.records.watchdog import Watchdog, stall_report
from tunesmith.run import assembly
from tunesmith.run.engines.timed import TimedEngine
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.groups import rollout_metrics, staleness_metrics
from tunesmith.types import Completion, Record, Rollout, RolloutGroup, Sampling, Task

SAMPLING = Sampling(max_new_tokens=4)
TASK = Task("train.jsonl:3", "prompt", (3, 4, 5))


PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")


def test_a_run_writes_the_trace_asked_for_and_its_metrics(tmp_path: Path, model: Path) -> None:
    rl_settings(tmp_path, model)
    held_out = str(write_lines(tmp_path / "held_out.jsonl", sums(4, 50)))
    changed: dict[str, Any] = {
        "monitor__trace_steps": [2],
        "data__eval": held_out,
        "eval__every": 1,
    }
    run = assembly.run_rl(None, rl_settings(tmp_path, model, **changed)).run_dir
    assert [path.name for path in (run / "trace").iterdir()] == ["step-000002.json"]
    lanes = check_trace(
        json.loads((run / "trace" / "step-000002.json").read_text(encoding="utf-8"))
    )
    assert list(lanes) == ["loop", "trainer", "engine 0", "reward", "rollouts"]
    names = {lane: {event["name"] for row in rows for event in row} for lane, rows in lanes.items()}
    assert names == {
        "loop": {"eval"},
        "trainer": {"sync", "rollout", "train"},
        "engine 0": {"generate"},
        "reward": {"score"},
        "rollouts": {"single_turn"},
    }
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "reward" in line]
    requests = [event for row in lanes["engine 0"] for event in row]
    # Twenty are sampled in the step: sixteen to learn from, four to evaluate before it.
    assert len(requests) == 20
    assert (
        sum(e["args"]["tokens"] for e in requests)
        >= lines[1]["sampled_tokens"]
        == lines[1]["tokens"]
    )
    for line in lines:
        assert 0 < line["idle/trainer"] < 1 and 0 < line["idle/engine"] < 1
        assert line["idle/trainer"] + line["idle/engine"] >= 1 - 1e-9, (
            "without overlap one of the two is idle"
        )
        assert line["engine_tokens_per_second"] > line["tokens_per_second"]
        assert line["staleness/mean"] == line["staleness/max"] == 0
        assert line["longest_sequence"] in range(4 + 8, 6 + 8 + 1)
        assert 0 < line["prefix_hit_share"] < 1


def test_supervised_training_is_on_the_timeline_too(tmp_path: Path, model: Path) -> None:
    run = assembly.run_sft(
        None, sft_settings(tmp_path, model, train__steps=2, monitor__trace_steps=[1, 2])
    ).run_dir
    assert [path.name for path in sorted((run / "trace").iterdir())] == [
        "step-000001.json",
        "step-000002.json",
    ]
    lanes = check_trace(
        json.loads((run / "trace" / "step-000002.json").read_text(encoding="utf-8"))
    )
    assert {event["name"] for row in lanes["trainer"] for event in row} == {"train"}
    for line in read_metrics(run / "metrics.jsonl"):
        assert 0 <= line["idle/trainer"] < 1 and "idle/engine" not in line


@pytest.mark.parametrize("steps", [{"train__steps": 3}, {"train__steps": None, "train__epochs": 1}])
def test_a_step_beyond_the_run_cannot_be_traced(
    tmp_path: Path, model: Path, steps: dict[str, Any]
) -> None:
    settings = rl_settings(tmp_path, model, monitor__trace_steps=[2, 4], **steps)
    with pytest.raises(
        ConfigError, match=r"monitor.trace_steps = \[2, 4\]: the run ends after step 3"
    ):
        assembly.run_rl(None, settings)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_staleness_is_counted_per_sampled_token() -> None:
    rollout = Rollout(TASK)
    rollout.observe([3, 4, 5])
    rollout.act(Completion([6, 7], [0.0, 0.0], [4, 5], "stop"))
    rollout.observe([8])
    rollout.records.append(Record([3, 6, 9], [False, False, True], [0.0] * 3, [-1, -1, 7], []))
    groups = [RolloutGroup(TASK, [rollout])]
    assert staleness_metrics(groups, 7) == {
        "staleness/mean": pytest.approx((3 + 2 + 0) / 3),
        "staleness/max": 3,
    }
    assert staleness_metrics([RolloutGroup(TASK, [Rollout(TASK)])], 7) == {}
    assert rollout_metrics(groups)["longest_sequence"] == 6


def test_requests_are_spans_also_those_that_fail_and_other_calls_reach_the_engine() -> None:
    timeline = Timeline()
    engine = TimedEngine(FakeEngine(), timeline, 4)

    async def run() -> None:
        await engine.load_weights(3)
        assert engine.version == 3
        await asyncio.gather(*(engine.generate([3, number], SAMPLING) for number in range(3)))
        await engine.close()
        with pytest.raises(EngineError):
            await engine.generate([3], SAMPLING)

    asyncio.run(run())
    spans = timeline._spans  # pyright: ignore[reportPrivateUsage]
    assert [s.lane for s in spans] == ["engine 4"] * 4 and not timeline.open_spans()
    assert sum(s.details.get("tokens", 0) for s in spans) == engine.stats().sampled_tokens
    assert "idle/engine" not in timeline.finish_step(1), "a closed engine takes no part"


class Stalled:
    """A reward that does not answer before it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:  # noqa: ARG002
        self.asked.set()
        await self.answer.wait()
        for rollout in rollouts:
            rollout.reward = 1.0


def test_the_watchdog_names_a_stalled_reward_and_the_run_goes_on() -> None:
    now = [0.0]
    said = list[str]()
    timeline = Timeline(now=lambda: now[0])
    watchdog = Watchdog(timeline, 300, said.append)

    async def run() -> list[RolloutGroup]:
        reward = Stalled()
        engine = TimedEngine(FakeEngine(), timeline)
        collector = Collector(
            engine.generate, reward, {"single_turn": SingleTurn()}, numbers, 60.0, timeline=timeline
        )
        with timeline.span(TRAINER, "rollout", waits_for="the rollouts of step 1"):
            collecting = asyncio.create_task(collector.collect([TASK], SAMPLING, 2, seed=0))
            await reward.asked.wait()
            now[0] += 301
            watchdog.check()
            reward.answer.set()
            return await collecting

    [group] = asyncio.run(run())
    assert [r.reward for r in group.rollouts] == [1.0, 1.0]
    assert len(said) == 1
    assert said[0].splitlines()[:3] == [
        "Nothing has moved for 5m01s:",
        "  reward: score, task train.jsonl:3 (5m01s)",
        "  trainer waits for the rollouts of step 1 (5m01s)",
    ]


def test_the_page_shows_what_is_said_when_nothing_moves() -> None:
    requests = [
        Span("engine 0", "generate", 42.0 + i, details={"prompt": 212 + i}) for i in range(7)
    ]
    reward = Span(REWARD, "score", 62.0, details={"task": "train.jsonl:31"})
    trainer = Span(TRAINER, "rollout", 0.0, waits_for="the rollouts of step 12")
    said = stall_report([*requests, reward, trainer], now=362.0, still=300.0).splitlines()
    shown = re.findall(r"```text\n(Nothing has moved.*?)\n```", PAGE, re.DOTALL)[0].splitlines()
    assert shown[:5] == said[:5] and shown[-1] == said[-1]


@pytest.mark.parametrize("command", ["rl", "ahead", "sft"])
@pytest.mark.more
def test_a_profile_has_the_operators_of_its_step(tmp_path: Path, model: Path, command: str) -> None:
    wanted: dict[str, Any] = {"monitor__profile_steps": [2], "train__steps": 3}
    if command == "ahead":
        wanted |= {
            "rollout__max_staleness": 1,
            "rollout__partial": True,
            "rollout__over_generation": 1.5,
        }
    if command == "sft":
        run = assembly.run_sft(None, sft_settings(tmp_path, model, **wanted)).run_dir
    else:
        run = assembly.run_rl(None, rl_settings(tmp_path, model, **wanted)).run_dir
    assert [path.name for path in (run / "profile").iterdir()] == ["step-000002.json.gz"]
    events = json.loads(gzip.decompress((run / "profile" / "step-000002.json.gz").read_bytes()))[
        "traceEvents"
    ]
    names = {event.get("name", "") for event in events}
    products = {"aten::mm", "tunesmith::multiply_rows"}
    assert names & products and any("Backward" in name for name in names), (
        "training, in whatever thread"
    )


def test_a_step_beyond_the_run_cannot_be_profiled(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor\.profile_steps"):
        assembly.run_sft(
            None, sft_settings(tmp_path, model, train__steps=2, monitor__profile_steps=[3])
        )
