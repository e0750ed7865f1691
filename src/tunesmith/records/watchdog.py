"""Reports who waits for whom when a run stalls. It does not stop anything."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import thread as executor
from itertools import groupby
from typing import Self

from tunesmith.records.progress import duration
from tunesmith.records.timeline import Span, Timeline

_FRAMES = 8
"""Innermost calls shown per thread."""


class Watchdog:
    """Reports when nothing on the timeline has begun, ended or changed for ``stall_after`` seconds.

    It reports again after twice that time, four times and so on. Use it as a context manager, which
    runs a thread.
    """

    def __init__(
        self, timeline: Timeline, stall_after: float, report: Callable[[str], None]
    ) -> None:
        self._timeline = timeline
        self._stall_after = stall_after
        self._report = report
        self._next = stall_after
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def check(self) -> None:
        """Report if a report is due."""
        still = self._timeline.now() - self._timeline.moved
        if still < self._stall_after:
            self._next = self._stall_after
        elif still >= self._next:
            while self._next <= still:
                self._next *= 2
            self._report(stall_report(self._timeline.open_spans(), self._timeline.now(), still))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._stall_after / 4)):
            self.check()


def stall_report(spans: Sequence[Span], now: float, still: float) -> str:
    """Who waits for what, who works and since when, and the threads' positions.

    Args:
        spans: the open spans.
        still: seconds without activity.
    """
    lines = [f"Nothing has moved for {duration(still)}:"]
    for lane, members in groupby(sorted(spans, key=lambda s: s.lane), key=lambda s: s.lane):
        at_work = list[Span]()
        for span in members:
            if span.waits_for is None:
                at_work.append(span)
            else:
                lines.append(f"  {lane} waits for {span.waits_for} ({duration(now - span.start)})")
        if at_work:
            oldest = min(at_work, key=lambda s: s.start)
            which = f"{len(at_work)} in flight, the oldest: " if len(at_work) > 1 else ""
            details = "".join(f", {name} {value}" for name, value in oldest.details.items())
            since = duration(now - oldest.start)
            lines.append(f"  {lane}: {which}{oldest.name}{details} ({since})")
    if len(lines) == 1:
        lines.append("  no work and no wait is on record")
    return "\n".join([*lines, *threads_at(), "  The run keeps waiting (monitor.stall_after)."])


def threads_at() -> list[str]:
    """The position of each thread that may block the run; background and idle threads are left
    out."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    lines: list[str] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or frame.f_code.co_filename == executor.__file__:
            continue
        waits = thread.name != "reward" or frame.f_code.co_name == "_work"  # for a call
        if thread.daemon and waits:
            continue
        calls = traceback.extract_stack(frame)[-_FRAMES:]
        lines.append(f"  Thread {thread.name} is here, innermost call last:")
        lines += [f"    {c.filename}:{c.lineno} in {c.name}: {c.line}" for c in calls]
    return lines
