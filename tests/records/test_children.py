"""Nothing outlives the process that it was started or made for, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tunesmith.records.children import owned_name, remove_stale
from tunesmith.run.weights.directories import PREFIX, shared_directory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(600)
"""
STUCK = """
import ctypes, sys
from tunesmith.records.children import end_with_parent
end_with_parent(int(sys.argv[1]))
print("ready", flush=True)
ctypes.PyDLL(None).sleep(600)  # holds the interpreter: no thread of this process can do anything
"""
OWNER = """
import os, signal, sys
from pathlib import Path
from tunesmith.records.children import remove_at_end
remove_at_end(Path(sys.argv[1]))
os.killpg(0, signal.SIGKILL)
"""


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_that_reads_nothing_ends_with_its_parent(stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, STUCK], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        said = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        child = psutil.Process(int(next(iter(said - {"ready"}))))
        if stopped:
            child.suspend()
        parent.kill()
        parent.wait()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_directory_goes_when_the_whole_process_group_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "two words\\n'"
    directory.mkdir()
    (directory / "weights").write_bytes(b"x")
    ended = subprocess.run(
        [sys.executable, "-c", OWNER, str(directory)], start_new_session=True, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL
    wait_until(lambda: not directory.exists())


def test_what_processes_that_are_no_more_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    mine = owned_name(PREFIX)
    machine, number, started, _ = mine.removeprefix(PREFIX).split("-")
    assert number == str(os.getpid())
    stale = [
        f"{PREFIX}{machine}-{gone.pid}-{started}-a",
        f"{PREFIX}{machine}-{number}-1{started}-b",
    ]
    others = [f"{mine}c", f"{PREFIX}another0-{gone.pid}-{started}-d", f"{PREFIX}abc", "else"]
    for name in (*stale, *others):
        (tmp_path / name).mkdir()
    assert {p.name for p in remove_stale(tmp_path, PREFIX)} == set(stale)
    assert {p.name for p in tmp_path.iterdir()} == set(others)


def test_weights_handed_over_in_files_clear_away_what_is_stale(tmp_path: Path) -> None:
    machine = owned_name("").split("-")[0]
    (tmp_path / f"{PREFIX}{machine}-{2**22 + 1}-1-x").mkdir()  # above the largest process number
    with shared_directory(1, tmp_path) as made:
        assert [str(p) for p in tmp_path.iterdir()] == [made]
