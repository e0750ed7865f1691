"""Engines and ranks that hold up the others, or are gone."""

from __future__ import annotations

from statistics import median

from tunesmith.records.doctor.columns import Figure
from tunesmith.records.doctor.rules import Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, ahead, at_least, times
from tunesmith.records.doctor.speed import LEAST_SECONDS

RULES = Rules[Signs]()


def _by_number(run: Signs, name: str) -> dict[int, Figure]:
    """A metric's mean over the steps, for each engine or rank; none in a short run."""
    if run.steps < 3 or not run["seconds"].sum > LEAST_SECONDS:
        return {}
    return {int(number): run[f"{name}/{number}"].mean for number in run.names(rf"{name}/(\d+)")}


def _without(values: dict[int, Figure], number: int) -> Figure:
    """The median of the others."""
    return Figure(median(value for other, value in values.items() if other != number))


@RULES.add("warning", at_least("system.engine_restarts = 10"))
@explains("uneven_engines")
def engines_lost(run: Signs) -> Evidence:
    """Their processes, machines or servers were lost.

    The log says which were lost and why; lost engines are replaced as often as this allows, where
    their machine is there.
    """
    engines = run["engines"]
    if engines.count and engines.min < engines.max:
        now = engines.values[-1]
        least = f"as few as {engines.min:.0f} of {engines.max:.0f} engines were running"
        yield f"{least}, {now:.0f} at the end"


@RULES.add("warning")
@explains("uneven_engines")
def slow_engine(run: Signs) -> Evidence:
    """Its GPU is slower, shared or hot, or its machine's CPUs are busy.

    Look at that engine's GPU (nvidia-smi: clocks, temperature, other processes), try its machine
    with tunesmith check machine, and leave it out if it stays slow.
    """
    speeds = _by_number(run, "engine_tokens_per_second")
    idle = _by_number(run, "idle/engine")
    if len(speeds) < 2:
        return
    slowest = min(speeds, key=lambda number: speeds[number])
    others = _without(speeds, slowest)
    # One with few requests decodes few at once, which is slower in all.
    busy = slowest in idle and idle[slowest] <= _without(idle, slowest) + 0.1
    if busy and speeds[slowest] < 0.7 * others:
        rate = f"engine {slowest} samples {speeds[slowest]:.0f} tokens per second"
        yield f"{rate} while it has requests, the others {others:.0f}"


@RULES.add("note", ahead)
def uneven_engines(run: Signs) -> Evidence:
    """A prompt's completions go to one engine, and there are few prompts, or some are far longer.

    The next step's prompts fill the gaps; so do more prompts in each step, or fewer engines.
    """
    idle = _by_number(run, "idle/engine")
    if len(idle) < 2:
        return
    least = min(idle, key=lambda number: idle[number])
    most = max(idle, key=lambda number: idle[number])
    if idle[most] - idle[least] > 0.4:
        busy = f"engine {most} has requests in {1 - idle[most]:.0%} of the time"
        yield f"{busy}, engine {least} in {1 - idle[least]:.0%}"


@RULES.add("warning", times("system.max_tokens_per_microbatch", 0.5))
def slow_rank(run: Signs) -> Evidence:
    """Its GPU is slower, shared or hot, or its micro-batches hold more work.

    Look at that rank's GPU (nvidia-smi: clocks, temperature, other processes) and try its machine
    with tunesmith check machine; smaller micro-batches spread the work more evenly.
    """
    busy = _by_number(run, "rank_busy")
    waiting = _by_number(run, "rank_waiting")
    if len(busy) < 2:
        return
    slowest = max(busy, key=lambda number: busy[number])
    others = _without(busy, slowest)
    waits = _without(waiting, slowest) if slowest in waiting else Figure(0)
    if busy[slowest] > 1.25 * others and waits > 0.1:
        share = f"rank {slowest} of the trainer computes in {busy[slowest]:.0%} of the time"
        yield f"{share}, the others in {others:.0%}, and wait for it in {waits:.0%}"
