"""The figures of each of several engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.fake_pool import Bench
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.loop.groups import engine_metrics
from tunesmith.run.loop.utilisation import Utilisation


def counted(steps: int, running: int, waiting: int, kv: int) -> EngineStats:
    return EngineStats(
        steps=steps,
        running_requests=running * steps,
        waiting_requests=waiting * steps,
        peak_kv_bytes=kv,
        kv_budget_bytes=100,
    )


async def test_each_engine_has_its_figures_since_the_last_step() -> None:
    bench = Bench(2)
    await bench.pool.load_weights(4)
    use = Utilisation(lambda: bench.pool.roster.seats)
    made: Any = bench.made
    stats = [counted(2, 8, 1, 40), counted(4, 2, 0, 10)]
    for member, own in zip(made, stats, strict=True):
        member.stats = lambda own=own: own
    first = use.metrics(5)
    assert first == {
        "engines": 2, "weight_age": 1, "weight_age/min": 1, "weight_age/max": 1,
        "weight_age/0": 1, "weight_age/1": 1,
        "engine_running/min": 2, "engine_running/max": 8,
        "engine_running/0": 8, "engine_running/1": 2,
        "engine_waiting/min": 0, "engine_waiting/max": 1,
        "engine_waiting/0": 1, "engine_waiting/1": 0,
        "kv_used/min": 0.1, "kv_used/max": 0.4, "kv_used/0": 0.4, "kv_used/1": 0.1,
    }  # fmt: skip
    more = replace(stats[0], steps=3, running_requests=16 + 5, waiting_requests=2 + 3)
    made[0].stats = lambda: more
    second = use.metrics(5)
    assert second["engine_running/0"] == 5 and second["engine_waiting/0"] == 3
    assert "engine_running/1" not in second, "it took no step"
    await bench.pool.close()


def test_running_and_waiting_requests_are_means_over_the_steps() -> None:
    whole = engine_metrics(EngineStats(steps=4, running_requests=8))
    assert (whole["engine_running"], whole["engine_waiting"]) == (2.0, 0.0)
    assert "engine_running" not in engine_metrics(EngineStats())
