"""Threads that hand over to each other leave no idle OpenMP workers behind, and workers sleep on
cores that are taken."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunesmith.models import openmp
from tunesmith.models.openmp import CALM, Crowding, to_thread

TASKS = Path("/proc/self/task")
PROGRAM = """
import asyncio, os
import torch
from tunesmith.models.openmp import end_team, to_thread

torch.set_num_threads(2)
numbers = torch.ones(1 << 20)
threads = lambda: len(os.listdir("/proc/self/task"))
end_team()
before = threads()
numbers.add(1)
counted = [threads() - before]
end_team()
counted.append(threads() - before)
numbers.add(1)
end_team()

async def elsewhere():
    await to_thread(numbers.add, 1)
    return threads() - before

counted.append(asyncio.run(elsewhere()))
print(counted)
"""


@pytest.mark.slow
@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_a_team_ends_with_its_work() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    # One worker while the main thread computes, none after it; then only the thread that
    # `to_thread` keeps.
    assert done.stdout.strip() == "[1, 0, 1]"


def test_nothing_is_ended_without_torch() -> None:
    program = (
        "import sys, tunesmith.models.openmp as openmp; openmp.end_team(); assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(to_thread(lambda: 1 / 0))


@pytest.mark.parametrize(
    ("waited", "crowded"),
    [
        ([0.04] * 20, False),
        ([0.1] * 20, False),
        ([0.04, 0.3], True),
        ([0.3] + [0.04] * (CALM - 1), True),
        ([0.3] + [0.04] * CALM, False),
        ([0.3] + [0.04, 0.1] * 20, True),
        ([0.3] + [0.04] * CALM + [0.1], False),
    ],
)
def test_cores_are_taken_while_threads_wait_for_them(waited: list[float], crowded: bool) -> None:
    crowding = Crowding(threads=2)
    assert [crowding.update(each) for each in waited][-1] is crowded


@pytest.mark.parametrize(("waited", "crowded"), [(1.5, False), (2, True)])
def test_many_threads_wait_more_on_free_cores(waited: float, crowded: bool) -> None:
    assert Crowding(threads=64).update(waited) is crowded


WATCH = """
import os, threading, time
import torch
from tunesmith.models import openmp

torch.set_num_threads(2)
numbers = torch.ones(1 << 20)

def spins():  # seconds of the idle worker
    seconds = 0
    for _ in range(20):
        numbers.add(1)
        begin = time.process_time()
        time.sleep(0.01)
        seconds += time.process_time() - begin
    return seconds

def keeps_reserve(wanted):
    until = time.monotonic() + 60
    while ("reserve" in [each.name for each in threading.enumerate()]) is not wanted:
        if time.monotonic() > until:
            return not wanted
        numbers.add(1)
    return wanted

usual = spins()
openmp.watch_cores()
one = {min(os.sched_getaffinity(0))}  # where both threads wait for each other
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), one)
found = [keeps_reserve(True), spins() < usual / 4]
openmp._waits = dict
found.append(keeps_reserve(False))
print(found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not TASKS.exists(), reason="Linux counts how long threads wait")
def test_idle_workers_sleep_while_other_threads_take_the_cores() -> None:
    usual = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", WATCH], env=usual, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, True, False]"


def test_the_watch_goes_on_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    tries = [RuntimeError, RuntimeError, KeyboardInterrupt]  # the last ends the watch

    def no_thread(_: object) -> None:
        raise tries.pop(0)("can't start new thread")

    waited = count(step=10**12)
    monkeypatch.setattr(openmp, "_waits", lambda: {"1": next(waited)})
    monkeypatch.setattr(openmp, "_Reserve", no_thread)
    monkeypatch.setattr(openmp, "INTERVAL", 0.001)
    with pytest.raises(KeyboardInterrupt):
        openmp._watch(None)  # pyright: ignore
    assert not tries


LIMITED = """
import os, resource, threading, time
import torch
from tunesmith.models import openmp

room = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
os.sched_getaffinity = lambda _: range(200)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
tried = threading.Event()
can_start = openmp._can_start

def counted(many):
    try:
        return can_start(many)
    finally:
        tried.set()

openmp._can_start = counted
reserve = openmp._Reserve(openmp._library())
tried.wait()
until = time.monotonic() + 60  # threads end a little after they are joined
while threads() - before != 1 and time.monotonic() < until:
    time.sleep(0.01)
print(threads() - before)
reserve.end()
"""


@pytest.mark.slow
@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_a_limit_on_memory_leaves_no_reserve_and_the_process_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"  # the thread that would keep it


@pytest.mark.parametrize(
    ("said", "watches"),
    [({}, True), ({"GOMP_SPINCOUNT": "7"}, False), ({"OMP_WAIT_POLICY": "active"}, False)],
)
def test_the_environment_may_say_how_workers_wait(
    said: dict[str, str], watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", said)
    monkeypatch.setattr(openmp, "_library", lambda: object())
    started: list[str] = []

    def thread(*, name: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: started.append(name))

    monkeypatch.setattr(openmp, "Thread", thread)
    openmp.start_watch.__wrapped__()
    assert started == ["cores"] * watches
