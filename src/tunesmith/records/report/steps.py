"""The timeline of a step from its metrics only, for runs and steps without a trace: phases and
shares by actor."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from tunesmith.records.plain import JsonObject
from tunesmith.records.report.metrics import Table
from tunesmith.records.timeline import OUTSIDE_STEPS, TRAINER_WAITS

ORDER = ("setup", "sync", "rollout", "train", "eval", "checkpoint", "other")
"""The phases of a step in the loop's order."""


def step_timelines(steps: Table, traced: Collection[int]) -> list[JsonObject]:
    """Timelines of the newest and the slowest step, unless they have a trace; in the form of
    ``read_trace``."""
    if not steps.rows:
        return []
    seconds = [0.0 if math.isnan(s) else s for s in steps.column("seconds")]
    slowest = max(range(len(seconds)), key=lambda row: seconds[row])
    made = [_timeline(steps, row) for row in sorted({slowest, steps.rows - 1})]
    return [each for each in made if each["rows"] and each["step"] not in traced]


def _timeline(steps: Table, row: int) -> JsonObject:
    """Phases follow each other. An engine's or a reward's share of the step is put at the beginning
    of the rollouts, because its actual times are unknown."""
    cells = {name: column[row] for name, column in steps.columns.items()}
    line = {name: value for name, value in cells.items() if not math.isnan(value)}
    names = [name for name in line if name.startswith("seconds/") and line[name] > 0]
    phases = {name.removeprefix("seconds/"): line[name] for name in names}
    lanes: dict[str, list[list[Any]]] = {}
    now = begin = 0.0
    for name in sorted(phases, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        begin = now if name == "rollout" else begin
        lane = "trainer" if name == "train" or name in TRAINER_WAITS else "loop"
        span = [name, round(now, 6), round(phases[name], 6), TRAINER_WAITS.get(name)]
        lanes.setdefault(lane, []).append(span)
        now += phases[name]
    inside = sum(s for name, s in phases.items() if name not in OUTSIDE_STEPS)
    for name, share in sorted(line.items()):
        kind, _, lane = name.partition("/")
        if lane.endswith(("/min", "/max")):
            continue
        if lane.startswith("engine") and kind == "idle" and share < 1:
            busy = round((1 - share) * inside, 6)
            lanes[lane.replace("/", " ")] = [["requests in flight", round(begin, 6), busy, None]]
        elif kind == "waiting" and share > 0:
            lanes[lane] = [["only this works", round(begin, 6), round(share * inside, 6), None]]
    if any(lane.startswith("engine ") for lane in lanes):
        lanes.pop("engine", None)  # the mean of all
    rows = [{"lane": lane, "spans": spans} for lane, spans in lanes.items()]
    return {"step": int(line.get("step", 0)), "left_out": 0, "rows": rows, "metrics": True}
