"""Busy and idle time, levels, traces and the watchdog, by a clock that tests set."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.traces import check_trace
from tunesmith.learn.usercode.calls import EpisodeCode
from tunesmith.records.timeline import REWARD, TRAINER, Span, Timeline, covered, mean_level
from tunesmith.records.trace import in_rows
from tunesmith.records.watchdog import Watchdog, threads_at


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0),
        ([(2, 4)], 2),
        ([(2, 4), (3, 6)], 4),
        ([(2, 8), (3, 4), (5, 6)], 6),
        ([(5, 6), (2, 3)], 2),
        ([(2, 3), (3, 4)], 2),
        ([(-5, 1), (9, 20)], 2),
        ([(-5, -1), (11, 12)], 0),
        ([(4, 4), (6, 5)], 0),
    ],
)
def test_covered_time_by_hand(intervals: list[tuple[float, float]], expected: float) -> None:
    assert covered(intervals, 0, 10) == expected


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)), max_size=12))
def test_covered_time_is_what_counting_moments_gives(lengths: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in lengths]
    moments = sum(any(a <= t < b for a, b in intervals) for t in range(20))
    assert covered(intervals, 0, 20) == moments


def test_the_mean_of_a_level_is_over_time() -> None:
    assert mean_level([(0, 4.0)], 0, 10) == 4
    assert mean_level([(0, 4.0), (5, 0.0)], 0, 10) == 2
    assert mean_level([(8, 10.0), (9, 0.0)], 0, 10) == 9, "the first value holds before it too"
    assert mean_level([(3, 1.0), (3, 7.0)], 3, 3) == 7


def test_an_engine_is_idle_while_it_has_no_request_and_the_trainer_while_it_waits(
    hand: Hand,
) -> None:
    timeline = Timeline(now=hand)
    timeline.enter("engine 0")
    with timeline.span("loop", "eval"), timeline.span("engine 0", "generate") as details:
        hand.time += 10  # beside the step: neither time nor tokens count
        details["tokens"] = 1000
    with timeline.span("trainer", "rollout", waits_for="the rollouts"):
        hand.time += 1
        with timeline.span("engine 0", "generate") as first:
            hand.time += 1
            with timeline.span("engine 0", "generate") as second:
                hand.time += 2
                second["tokens"] = 20
            first["tokens"] = 10
    with timeline.span("trainer", "train"):
        hand.time += 6
    assert timeline.finish_step(1) == pytest.approx(
        {"idle/trainer": 0.4, "idle/engine": 0.7, "engine_tokens_per_second": 10}
    )


def test_each_of_several_engines_is_told_and_one_that_left_is_not(hand: Hand) -> None:
    timeline = Timeline(now=hand)
    for number in range(3):
        timeline.enter(f"engine {number}")
    start = hand.time
    hand.time += 10
    timeline.add("engine 0", "generate", start, start + 5, tokens=50)
    timeline.add("engine 0", "generate", start + 2, start + 8, tokens=30)
    timeline.leave("engine 1")
    assert timeline.finish_step(1) == pytest.approx(
        {
            "idle/trainer": 1, "idle/engine": 0.6, "idle/engine/0": 0.2, "idle/engine/2": 1,
            "engine_tokens_per_second": 10, "engine_tokens_per_second/0": 10,
            "idle/engine/min": 0.2, "idle/engine/max": 1,
            "engine_tokens_per_second/min": 10, "engine_tokens_per_second/max": 10,
        }
    )  # fmt: skip


def test_each_rank_computes_or_waits_for_others(hand: Hand) -> None:
    """Of 10 s ranks compute 6 s: the first one all the time, the second one 4 s of it; 1 s of both
    lies in a checkpoint, which does not count."""
    timeline = Timeline(now=hand)
    start = hand.time
    hand.time += 11
    timeline.add("rank 0", "forward_backward", start, start + 6)
    timeline.add("rank 0", "save", start + 10, start + 11)
    timeline.add("rank 1", "forward_backward", start, start + 3)
    timeline.add("rank 1", "step", start + 5, start + 6)
    timeline.add("rank 1", "save", start + 10, start + 11)
    timeline.add("loop", "checkpoint", start + 10, start + 11)
    metrics = timeline.finish_step(1)
    assert {name: value for name, value in metrics.items() if "rank" in name} == pytest.approx(
        {
            "rank_busy": 0.5, "rank_busy/min": 0.4, "rank_busy/max": 0.6,
            "rank_busy/0": 0.6, "rank_busy/1": 0.4,
            "rank_waiting": 0.1, "rank_waiting/min": 0.0, "rank_waiting/max": 0.2,
            "rank_waiting/0": 0.0, "rank_waiting/1": 0.2,
        }
    )  # fmt: skip


def test_a_request_that_goes_on_is_shared_among_the_steps(hand: Hand) -> None:
    timeline = Timeline(now=hand)
    timeline.enter("engine 0")
    with timeline.span("engine 0", "generate") as details:
        hand.time += 4
        assert timeline.finish_step(1)["idle/engine"] == 0
        hand.time += 2
        details["tokens"] = 12
    hand.time += 2
    metrics = timeline.finish_step(2)
    assert metrics["idle/engine"] == 0.5 and metrics["engine_tokens_per_second"] == 6
    assert not timeline.open_spans()
    hand.time += 1
    assert timeline.finish_step(3)["idle/engine"] == 1


def test_levels_keep_their_value_from_step_to_step(hand: Hand) -> None:
    timeline = Timeline(now=hand)
    timeline.level("queue", 2)
    hand.time += 1
    timeline.level("queue", 6)
    hand.time += 1
    first = timeline.finish_step(1)
    hand.time += 5
    second = timeline.finish_step(2)
    assert (first["queue/mean"], first["queue/max"]) == (4, 6)
    assert (second["queue/mean"], second["queue/max"]) == (6, 6)


def test_spans_of_many_threads_and_tasks_are_all_there() -> None:
    timeline = Timeline()

    def work() -> None:
        for _ in range(200):
            with timeline.span("engine 0", "generate") as details:
                details["tokens"] = 1

    async def wait() -> None:
        with timeline.span(REWARD, "score"):
            await asyncio.sleep(0)

    async def several() -> None:
        await asyncio.gather(*(wait() for _ in range(50)))

    timeline.enter("engine 0")
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(several())
    for thread in threads:
        thread.join()
    spans = timeline._spans  # pyright: ignore[reportPrivateUsage]
    assert len(spans) == 850 and not timeline.open_spans()
    assert 0 <= timeline.finish_step(1)["idle/engine"] < 1


def test_a_trace_of_the_steps_asked_for_has_a_lane_per_actor(hand: Hand, tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace", [2], now=hand)
    with timeline.span("engine 1", "generate") as details:
        hand.time += 1
        timeline.finish_step(1)
        timeline.level("queue", 3)
        with (
            timeline.span(TRAINER, "rollout", waits_for="the rollouts"),
            timeline.span("engine 1", "generate"),
        ):
            hand.time += 0.5
        details["tokens"] = 7
    with timeline.span("engine 10", "generate", task="ä"):
        hand.time += 0.25
        timeline.finish_step(2)
    timeline.finish_step(3)
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step-000002.json"]
    trace = json.loads((tmp_path / "trace" / "step-000002.json").read_text(encoding="utf-8"))
    lanes = check_trace(trace)
    assert list(lanes) == ["trainer", "engine 1", "engine 10"], "in this order from top to bottom"
    [[wait]] = lanes["trainer"]
    assert (wait["ts"], wait["dur"], wait["args"]) == (0, 5e5, {"waits for": "the rollouts"})
    assert sorted(e["args"].get("tokens", 0) for row in lanes["engine 1"] for e in row) == [0, 7]
    [[open_one]] = lanes["engine 10"]
    assert (open_one["ts"], open_one["dur"], open_one["args"]) == (5e5, 2.5e5, {"task": "ä"})
    assert [(e["ts"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "C"] == [
        (0, {"value": 3})
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_as_many_rows_as_spans_overlap_at_most(lengths: list[tuple[int, int]]) -> None:
    spans = [Span("engine 0", "generate", start, start + length) for start, length in lengths]
    found = in_rows(spans)
    assert sorted(map(id, spans)) == sorted(id(s) for row in found for s in row)
    for row in found:
        for before, after in pairwise(row):
            assert before.stop is not None and before.stop <= after.start
    long = [(s, s + n) for s, n in lengths if n]
    if len(long) == len(lengths):
        assert len(found) == max((sum(a <= t < b for a, b in long) for t in range(41)), default=0)


def test_the_watchdog_names_who_waits_for_whom_with_growing_pauses(hand: Hand) -> None:
    timeline = Timeline(now=hand)
    said = list[str]()
    watchdog = Watchdog(timeline, 60, said.append)
    with (
        timeline.span(TRAINER, "rollout", waits_for="the rollouts of step 12"),
        timeline.span(REWARD, "score", task="train.jsonl:7"),
        timeline.span("engine 0", "generate"),
    ):
        hand.time += 1
        with timeline.span("engine 0", "generate", prompt=12):
            for passed, reports in [
                (59, 0),
                (1, 1),
                (59, 1),
                (1, 2),
                (60, 2),
                (60, 3),
                (239, 3),
                (1, 4),
            ]:
                hand.time += passed
                watchdog.check()
                assert len(said) == reports
        watchdog.check()
        hand.time += 60
        watchdog.check()
        assert len(said) == 5, "what moved counts anew"
    first = said[0].splitlines()
    assert first[0] == "Nothing has moved for 1m00s:"
    assert "  trainer waits for the rollouts of step 12 (1m01s)" in first
    assert "  reward: score, task train.jsonl:7 (1m01s)" in first
    assert "  engine 0: 2 in flight, the oldest: generate (1m01s)" in first
    assert "  Thread MainThread is here, innermost call last:" in first
    assert any("test_timeline.py" in line and "watchdog.check()" in line for line in first)


def test_the_watchdog_shows_the_thread_that_trains(hand: Hand) -> None:
    timeline = Timeline(now=hand)
    said = list[str]()
    ready = threading.Event()
    done = threading.Event()

    def hang_in_training() -> None:
        with timeline.span(TRAINER, "train"):
            ready.set()
            done.wait()

    thread = threading.Thread(target=hang_in_training, name="training")
    thread.start()
    ready.wait()
    hand.time += 100
    Watchdog(timeline, 60, said.append).check()
    done.set()
    thread.join()
    assert "trainer: train (1m40s)" in said[0] and "Thread training is here" in said[0]
    assert "in hang_in_training: done.wait()" in said[0]


def test_the_watchdogs_thread_looks_by_itself_and_ends(hand: Hand) -> None:
    said = list[str]()
    told = threading.Event()

    def report(text: str) -> None:
        said.append(text)
        told.set()

    timeline = Timeline(now=hand)
    with Watchdog(timeline, 0.01, report):
        hand.time += 1
        assert told.wait(60)
    assert "no work and no wait" in said[0]
    assert not any(t.name == "watchdog" for t in threading.enumerate())


@pytest.mark.more
async def test_a_reward_that_hangs_in_its_thread_is_shown_by_its_lines() -> None:
    begun = threading.Event()
    end = threading.Event()

    def hangs() -> None:
        begun.set()
        end.wait(300)

    def shown() -> bool:
        return any(line.endswith("in hangs: end.wait(300)") for line in threads_at())

    with EpisodeCode(300.0) as code:
        call = asyncio.ensure_future(code.run("hangs", hangs))
        await asyncio.to_thread(begun.wait, 60)
        assert shown()
        end.set()
        await call
        for _ in range(6000):  # it may still be on its way back
            if shown():
                await asyncio.sleep(0.01)
        assert not shown()


@pytest.mark.more
def test_threads_with_nothing_to_do_are_not_shown() -> None:
    def shown() -> list[str]:
        return [line for line in threads_at() if line.startswith("  Thread unused")]

    with ThreadPoolExecutor(1, "unused") as pool:
        pool.submit(int).result()
        for _ in range(6000):  # it may still be on its way back
            if shown():
                time.sleep(0.01)
        assert not shown()
    assert any("test_timeline.py" in line for line in threads_at())
