"""Reports that something without a progress display is still running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count

AFTER = (10.0, 30.0, 60.0)
"""Seconds until the first reports; then there is one per minute."""


@contextmanager
def long_wait(
    doing: str, report: Callable[[str], None] | None = None, after: Sequence[float] | None = None
) -> Generator[None]:
    """While the body runs, report ``still {doing}: 10 s`` from a thread; nothing once it has ended.

    Args:
        report: receives the text; None: print.
        after: when to report, in seconds since the start, then at intervals of the last value;
            None: ``AFTER``.
    """
    report = report or partial(print, flush=True)
    after = after or AFTER
    ended = threading.Event()
    begun = time.monotonic()

    def report_times() -> None:
        for moment in chain(after, count(2 * after[-1], after[-1])):
            if ended.wait(begun + moment - time.monotonic()):
                return
            report(f"still {doing}: {moment:g} s")

    reporter = threading.Thread(target=report_times, name="long wait", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
