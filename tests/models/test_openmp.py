"""Threads that hand over to each other leave no idle OpenMP workers behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.models.openmp import SPINS, spin_briefly, to_thread

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
    ("said", "spins"),
    [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_workers_spin_briefly_unless_the_environment_says_how_they_wait(
    said: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(said))
    spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_the_command_sets_it_before_torch_is_loaded() -> None:
    program = (
        "import os, sys; sys.argv = ['tunesmith', '--version']; from tunesmith.cli.main import "
        "main\n"
        "try: main()\n"
        "except SystemExit: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{SPINS} False"
