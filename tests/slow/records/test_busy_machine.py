"""A busy process on each core, beside this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tunesmith.records import other_programs
from tunesmith.records.other_programs import METRIC, OtherPrograms

SECONDS = 20


def test_a_busy_process_on_each_core_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell ends at once, so that none of them is this process's child."""
    monkeypatch.setattr(other_programs, "LEAST_SECONDS", 0.0)
    loop = f"import os, time; end = time.time() + {SECONDS}; name = os.getpid()\n"
    loop += "os.write(1, b'%d\\n' % name)\nwhile time.time() < end: pass"
    command = f'"{sys.executable}" -c "$0" & ' * len(os.sched_getaffinity(0))
    shell = subprocess.Popen(
        ["sh", "-c", command, loop], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert shell.stdout is not None and shell.wait() == 0
    busy = [int(shell.stdout.readline()) for _ in os.sched_getaffinity(0)]
    try:
        others = OtherPrograms()
        deadline = time.monotonic() + SECONDS / 2
        share = 0.0
        while share < 0.8:
            assert time.monotonic() < deadline, share
            time.sleep(0.5)  # the clocks of cores have ticks of 0.01 s
            share = others.metrics()[METRIC]
    finally:
        for process in busy:
            os.kill(process, 9)
