"""One contract for objects in other processes, however they are started: calls, errors,
cancellation, liveness."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tunesmith.config.system import SystemSection
from tunesmith.errors import ConfigError, EngineLostError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.learn.usercode.far import Far, gather
from tunesmith.plan.cluster import Bundle

CODE = """
import asyncio, gc, os, sys, threading, time
from types import SimpleNamespace
from tunesmith.errors import ConfigError

class Strange(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

class Thing:
    def __init__(self, start=0):
        self.part = SimpleNamespace(n=start)
        self.begun, self.ended = [], []
        self.busy = self.most = 0
        self.released = threading.Event()
    def add(self, n, *, times=1):
        self.part.n += n * times
        return self.part.n
    def big(self, data):
        return data + data
    def fail(self, kind):
        raise {"own": ConfigError("a", "b"), "value": ValueError("of there"), "strange": Strange(1, 2)}[kind]
    def thread(self):
        return threading.current_thread().name
    def collects(self):
        return gc.isenabled(), gc.get_freeze_count() > 0
    def wait(self, seconds):
        time.sleep(seconds)
    def alone(self):
        self.busy += 1
        time.sleep(0.01)
        self.most = max(self.most, self.busy)
        self.busy -= 1
        return self.most
    def hold(self):
        released = self.released.wait(600)
        self.released.clear()
        return released
    async def release(self):
        self.released.set()
    def mute(self):
        sys.stdout = None
        return "done"
    def die(self):
        print("my last words", file=sys.stderr)
        os._exit(7)
    async def later(self, seconds, value):
        self.begun.append(value)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.ended.append(value)
            raise
        return value

def thing(start=0):
    return Thing(start)
"""
Start = Callable[[], Far]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module that the other process imports too."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "far_thing.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}:{before}"
    import far_thing  # pyright: ignore[reportMissingImports]

    yield far_thing
    sys.path.remove(str(folder))
    os.environ["PYTHONPATH"] = before


@contextmanager
def children() -> Generator[Start]:
    made: list[Far] = []

    def start() -> Far:
        made.append(ChildProcess("the engine's process", EngineLostError))
        return made[-1]

    yield start
    for far in made:
        far.close()


@contextmanager
def actors() -> Generator[Start]:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")
    from tunesmith.run.processes.ray_cluster import RayCluster

    with RayCluster.open(SystemSection(), [Bundle(("rollout",), 0.1, 0.0)] * 3) as cluster:
        yield lambda: cluster.spawn("rollout", EngineLostError)


ACTORS = pytest.param(actors, marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow])


@pytest.fixture(scope="module", params=[children, ACTORS])
def start(request: pytest.FixtureRequest, code: Any, new_children: None) -> Iterator[Start]:
    del code, new_children
    with request.param() as starter:
        yield starter


@pytest.fixture(scope="module")
def far(start: Start, code: Any) -> Iterator[Far]:
    """One for all checks that leave it as it is."""
    far = start()
    far.make(partial(code.thing, 3)).result(100)
    yield far
    far.close()


def test_collections_leave_out_what_the_process_imported(far: Far) -> None:
    assert far.call("collects") == (True, True)


def test_calls_and_attributes(far: Far) -> None:
    before = far.get("part.n")
    assert far.call("add", 2) == before + 2
    assert far.call("add", 2, times=3) == before + 8 == far.get("part.n")
    data = os.urandom(3 << 20)
    assert far.call("big", data) == data + data
    assert far.pid() != os.getpid()


async def test_methods_run_one_after_the_other_and_coroutines_meanwhile(far: Far) -> None:
    held = far.submit("hold")
    counts = [far.submit("alone") for _ in range(5)]
    assert await asyncio.gather(*(far.call_async("later", 0.05, i) for i in range(3))) == [0, 1, 2]
    await far.call_async("release")
    assert await asyncio.to_thread(gather, [held, *counts]) == [True] + [1] * 5


@pytest.mark.timeout(60)
def test_an_answer_comes_while_nothing_is_printed(far: Far) -> None:
    """As within ``redirect_stdout(None)`` on another thread."""
    assert far.call("mute") == "done"


def test_errors_arrive_as_they_were_raised(far: Far) -> None:
    with pytest.raises(ConfigError) as error:
        far.call("fail", "own")
    assert error.value.args == ("a", "b")
    with pytest.raises(ValueError, match="of there"):
        far.call("fail", "value")
    with pytest.raises(RuntimeError, match="Strange: 1 and 2"):
        far.call("fail", "strange")
    with pytest.raises(AttributeError):
        far.call("nothing")
    assert far.call("add", 0) == far.get("part.n"), "it goes on"


def test_what_cannot_travel_is_refused_here(far: Far) -> None:
    with pytest.raises(TypeError):
        far.call("big", threading.Lock())
    assert not far.lost


def test_cancelling_ends_the_coroutine_there(far: Far) -> None:
    async def run() -> None:
        task = asyncio.create_task(far.call_async("later", 600, "cancelled"))
        while "cancelled" not in far.get("begun"):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while "cancelled" not in far.get("ended"):
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), 100))


def test_an_object_that_cannot_be_built(start: Start, code: Any) -> None:
    far = start()
    with pytest.raises(TypeError, match="positional"):
        far.make(partial(code.thing, 1, 2)).result(100)
    far.close()


def made(start: Start, code: Any) -> Far:
    far = start()
    far.make(code.thing).result(100)
    return far


@pytest.mark.parametrize(("how", "words"), [("killed", "SIGKILL"), ("exits", "7")])
def test_a_process_that_ends_fails_what_waits_and_what_comes(
    start: Start, code: Any, how: str, words: str
) -> None:
    far = made(start, code)
    waiting = (
        [far.submit("wait", 600), far.submit("later", 600, 0)]
        if how == "killed"
        else [far.submit("die")]
    )
    if how == "killed":
        os.kill(far.pid(), signal.SIGKILL)
    for answer in waiting:
        with pytest.raises(EngineLostError) as error:
            answer.result(100)
        if isinstance(far, ChildProcess):
            assert words in str(error.value) and (
                how == "killed" or "my last words" in str(error.value)
            )
    far.ended.result(100)
    with pytest.raises(EngineLostError, match="the engine"):
        far.call("add", 1)


def test_one_that_computes_for_long_is_alive(far: Far) -> None:
    held = far.submit("hold")
    for _ in range(3):
        assert far.pid(), "signs of life come meanwhile"
    assert not held.done()
    asyncio.run(far.call_async("release"))
    assert held.result(100)


def test_closing_fails_what_waits(start: Start, code: Any) -> None:
    far = made(start, code)
    waiting = far.submit("wait", 600)
    far.close()
    with pytest.raises(EngineLostError, match="was closed"):
        waiting.result(100)
    assert far.lost and far.ended.done()


def test_the_first_failure_ends_the_wait(start: Start, code: Any) -> None:
    one = made(start, code)
    other = made(start, code)
    held = one.submit("wait", 600)
    with pytest.raises(ValueError, match="of there"):
        gather([held, other.submit("fail", "value")])
    assert not held.done()
    one.close(), other.close()


def test_two_that_start_at_once_have_a_place_each(start: Start, code: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: start(), range(2)))
    for answer in [far.make(partial(code.thing, 1)) for far in both]:
        answer.result(100)
    for far in both:
        far.close()


# Children only


def test_a_process_that_hangs_is_killed(code: Any) -> None:
    unwatched: Any = None
    far = ChildProcess("the engine's process", EngineLostError, patience=unwatched)
    far.make(code.thing).result(100)
    process = psutil.Process(far.pid())
    process.suspend()
    far._patience = 0.5
    far._watch()
    with pytest.raises(EngineLostError, match=r"did not answer for [01] s"):
        far.submit("add", 1).result(100)
    process.wait(100)


PARENT = """
import sys, time
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.errors import EngineLostError
print(ChildProcess("child", EngineLostError).pid(), flush=True)
time.sleep(60)
"""


def test_a_child_ends_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([child], 100)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_signals_of_the_terminal_leave_a_child_alone(far: Far) -> None:
    if isinstance(far, ChildProcess):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(far.pid(), number)
        assert far.call("add", 0) == far.get("part.n")


def test_a_child_in_another_environment(
    tmp_path: Path, code: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/bash\nexport ANOTHER=yes\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    far = ChildProcess("child", EngineLostError, python=interpreter)
    far.make(partial(__import__, "os")).result(100)
    assert far.call("environ.get", "ANOTHER") == "yes"
    far.call("write", 1, b"printed\n")
    far.close()
    out, err = capfd.readouterr()
    assert "printed" in err and "printed" not in out
    del code
