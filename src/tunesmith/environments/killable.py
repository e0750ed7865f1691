"""Calling a function in a worker process that is killed when it overruns.

For work that no thread can stop: computer algebra on what a model wrote, regular expressions that
backtrack without end. A worker is a bare interpreter that imports one program file (no torch, nothing of
the parent's), starts on first use and is replaced after a kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tunesmith.errors import DeadlineExceeded, TunesmithError

STARTUP_SECONDS = 60.0
_CHILD = Path(__file__).with_name("killable_child.py")


class WorkerError(TunesmithError, RuntimeError):
    """A worker process raised, died or could not start."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function of a file, run in the worker. Arguments and result must survive JSON."""

    file: Path
    function: str
    deadline: float
    """Seconds for one call, not counting the worker's start."""


class KillablePool:
    """Up to ``workers`` processes of one program, each started when the others are busy; ends with ``close``."""

    def __init__(self, program: Program, workers: int = 1) -> None:
        self._program = program
        self._max = workers
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._threads = ThreadPoolExecutor(workers, "killable")

    def submit(self, *arguments: Any) -> Future[Any]:
        """Run the function on these arguments.

        The future raises ``DeadlineExceeded`` if the call was killed, ``WorkerError`` if it raised or its
        process died.
        """
        return self._threads.submit(self._call, arguments)

    def close(self) -> None:
        """End the workers, after the calls that they are at. A later call starts them anew."""
        self._threads.shutdown(cancel_futures=True)
        self._threads = ThreadPoolExecutor(self._max, "killable")
        while self._idle:
            self._idle.pop().kill()

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self._program)
        try:
            return worker.ask(arguments, self._program.deadline)
        except DeadlineExceeded:
            worker.kill()
            raise
        finally:
            with self._lock:
                if worker.alive:
                    self._idle.append(worker)


class _Worker:
    """One process, spoken with in JSON through a pipe."""

    def __init__(self, program: Program) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._pipe, theirs = Pipe()
        end = theirs.fileno()
        numbers = [str(number) for number in (program.deadline, end, os.getpid())]
        command = [sys.executable, "-P", _CHILD, program.file, program.function, *numbers]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, pass_fds=[end]
        )
        theirs.close()
        try:
            self._answer(STARTUP_SECONDS)
        except DeadlineExceeded:
            self.kill()
            raise WorkerError(f"{program.file.name} did not start within {STARTUP_SECONDS:g} s") from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, arguments: tuple[Any, ...], seconds: float) -> Any:
        try:
            self._pipe.send_bytes(json.dumps(arguments).encode())
        except OSError:
            raise self._ended() from None
        return self._answer(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._said.close()

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise DeadlineExceeded("the worker was killed at its deadline")
        try:
            reply = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        if "raised" in reply:
            raise WorkerError(reply["raised"])
        return reply["value"]

    def _ended(self) -> WorkerError:
        """What its process said last."""
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read()[-2000:].decode(errors="replace").strip()
        self.kill()
        return WorkerError(f"the worker process ended with code {code}" + (f":\n{said}" if said else ""))
