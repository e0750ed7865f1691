from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple

import pytest

from tunesmith.records import other_programs
from tunesmith.records.other_programs import METRIC, CoreSeconds, OtherPrograms


def readings(monkeypatch: pytest.MonkeyPatch, *values: CoreSeconds) -> OtherPrograms:
    coming: Iterator[CoreSeconds] = iter(values)
    monkeypatch.setattr(other_programs, "read", lambda: next(coming))
    return OtherPrograms()


def test_what_this_run_computes_is_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 cores, 10 s each, 26 s were busy, 16 of them with this run."""
    now = time.monotonic()
    others = readings(
        monkeypatch,
        CoreSeconds(now - 10, 100, 50, 4),
        CoreSeconds(now, 126, 66, 4),
        CoreSeconds(now, 0, 0, 4),
    )
    assert others.metrics() == {METRIC: pytest.approx(10 / 40)}
    assert others.metrics() == {}, "the last reading is not long ago"


@pytest.mark.parametrize(("busy", "share"), [(15.0, 0.0), (500.0, 1.0)])
def test_clocks_that_disagree_give_a_share(
    busy: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    others = readings(monkeypatch, CoreSeconds(now - 10, 0, 0, 2), CoreSeconds(now, busy, 18, 2))
    assert others.metrics() == {METRIC: share}


def test_what_a_child_computed_is_our_own_also_when_it_has_ended() -> None:
    before = other_programs.read()
    loop = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)
    after = other_programs.read()
    assert after.own - before.own > 0.15
    assert after.cores == len(os.sched_getaffinity(0))
    assert all(b >= a for a, b in zip(astuple(before), astuple(after), strict=True))
