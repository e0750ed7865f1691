"""Traces of steps, as ``monitor.trace_steps`` writes them: who did what and when."""

from __future__ import annotations

import json
from pathlib import Path

from tunesmith.records.plain import JsonObject

TRACES = 8
"""Number of steps shown: the last ones."""
SPANS = 4000
"""Number of spans shown per step: the longest ones."""


def read_traces(folder: Path) -> list[JsonObject]:
    """``step`` and ``rows``, each with its ``lane`` and ``spans``: (name, start, seconds, what it
    waits for)."""
    return [*filter(None, map(read_trace, sorted(folder.glob("step-*.json"))[-TRACES:]))]


def read_trace(path: Path) -> JsonObject | None:
    """None if the file is half written or of another version."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        step = document["otherData"]["step"]
        events = document["traceEvents"]
        named = [event for event in events if event["name"] == "process_name"]
        lanes = {event["pid"]: str(event["args"]["name"]) for event in named}
        spans = [event for event in events if event["ph"] == "X"]
        longest = sorted(spans, key=lambda event: -event["dur"])[:SPANS]
        rows: dict[tuple[int, int], JsonObject] = {}
        for event in sorted(longest, key=lambda event: (event["pid"], event["tid"], event["ts"])):
            empty: JsonObject = {"lane": lanes.get(event["pid"], ""), "spans": []}
            row = rows.setdefault((event["pid"], event["tid"]), empty)
            start, seconds = (round(event[name] / 1e6, 6) for name in ("ts", "dur"))
            row["spans"].append([event["name"], start, seconds, event["args"].get("waits for")])
        return {"step": step, "left_out": len(spans) - len(longest), "rows": list(rows.values())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
