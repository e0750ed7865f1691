"""Spans of time, and a step made of them in Chrome's trace format, which chrome://tracing and
ui.perfetto.dev display.

Format: Trace Event Format (Google), JSON object with ``traceEvents``; times in microseconds. Spans
of one row must not overlap, so a lane that does several things at once is a group ("process") of
several rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError, boundary
from tunesmith.records.plain import JsonObject

Event = JsonObject

_ORDER = ("loop", "trainer", "engine", "reward", "rollouts")


@dataclass(slots=True, eq=False)
class Span:
    """An activity, with times in seconds of the timeline's clock.

    ``lane`` names the actor; spans of one lane may overlap.
    """

    lane: str
    name: str
    start: float
    stop: float | None = None
    """None while it is open."""
    waits_for: str | None = None
    """The object of the wait; None for work."""
    details: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The activities between two calls of ``finish_step``; longer spans are cut at both ends."""

    number: int
    start: float
    stop: float
    spans: tuple[Span, ...]
    levels: Mapping[str, list[tuple[float, float]]]
    """(time, value) by name."""


def write_trace(step: FinishedStep, directory: Path) -> Path:
    """Write ``step-000012.json``.

    Raises:
        StorageError: the file cannot be written.
    """
    path = directory / f"step-{step.number:06d}.json"
    text = json.dumps(chrome_trace(step), ensure_ascii=False, default=str)
    with boundary(StorageError, f"cannot write {path}", OSError):
        directory.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def chrome_trace(step: FinishedStep) -> JsonObject:
    """The object of the file. Time begins with the step."""
    lanes = sorted({span.lane for span in step.spans}, key=_place)
    events: list[Event] = []
    tid = 1
    for pid, lane in enumerate(lanes, 1):
        events.append(_event("M", "process_name", pid, tid, args={"name": lane}))
        events.append(_event("M", "process_sort_index", pid, tid, args={"sort_index": pid}))
        for row in in_rows([span for span in step.spans if span.lane == lane]):
            # Row numbers are unique: viewers take them for threads of one machine.
            events.append(_event("M", "thread_name", pid, tid, args={"name": lane}))
            events += [_complete(span, step.start, pid, tid) for span in row]
            tid += 1
    for name, changes in step.levels.items():
        for moment, value in changes:
            at = round((moment - step.start) * 1e6, 3)
            events.append(_event("C", name, 0, 0, ts=at, args={"value": value}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step.number}}


def in_rows(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans in rows without overlap; each span goes into the first free row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.stop)):
        for row in rows:
            last = row[-1].stop
            if last is not None and last <= span.start:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _complete(span: Span, start: float, pid: int, tid: int) -> Event:
    assert span.stop is not None, "a span of a finished step is cut at its end"
    begin = round((span.start - start) * 1e6, 3)
    args = dict(span.details)
    if span.waits_for is not None:
        args["waits for"] = span.waits_for
    # The end is rounded, not the duration, so that consecutive spans do not overlap.
    duration = round((span.stop - start) * 1e6 - begin, 3)
    return _event("X", span.name, pid, tid, cat=span.lane, ts=begin, dur=duration, args=args)


def _event(phase: str, name: str, pid: int, tid: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, **more}


def _place(lane: str) -> tuple[int, str, int]:
    kind, _, number = lane.partition(" ")
    place = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
    return place, kind, int(number) if number.isdigit() else -1
