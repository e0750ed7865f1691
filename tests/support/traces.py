"""What holds for every trace."""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def check_trace(trace: dict[str, Any]) -> dict[str, list[list[dict[str, Any]]]]:
    """The rows of each lane, after what viewers ask: every row named, in no row two spans that
    overlap."""
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} <= {"M", "X", "C"}
    assert all({"name", "pid", "tid"} <= e.keys() for e in events)
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named), "numbers of rows are used once"
    found: dict[str, list[list[dict[str, Any]]]] = {lane: [] for lane in lanes.values()}
    for (pid, tid), name in named.items():
        assert name == lanes[pid]
        row = sorted(
            (e for e in events if e["ph"] == "X" and e["tid"] == tid), key=lambda e: e["ts"]
        )
        assert row and all(e["pid"] == pid and e["ts"] >= 0 and e["dur"] >= 0 for e in row)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(row))
        found[name].append(row)
    assert sum(len(row) for lane in found.values() for row in lane) == sum(
        e["ph"] == "X" for e in events
    )
    return found
