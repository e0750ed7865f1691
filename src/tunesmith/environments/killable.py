"""Calling a function in a worker process that is killed when it overruns.

For work that no thread can stop: computer algebra on what a model wrote, regular expressions that
backtrack without end. A worker is a bare interpreter that imports one program file (no torch, nothing of
the parent's), starts on first use and is replaced after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class _Job:
    arguments: tuple[Any, ...]
    result: Future[Any] = field(default_factory=Future[Any])


class KillablePool:
    """Up to ``workers`` processes of one program, each started when the others are busy."""

    def __init__(self, program: Program, workers: int = 1) -> None:
        self._program = program
        self._max = workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pending = 0
        self.kills = 0
        """Workers killed because a call overran."""

    def submit(self, *arguments: Any) -> Future[Any]:
        """Run the function on these arguments.

        The future raises ``DeadlineExceeded`` if the call was killed, ``WorkerError`` if it raised or its
        process died.
        """
        job = _Job(arguments)
        with self._lock:
            self._pending += 1
            if self._pending > len(self._threads) < self._max:
                thread = threading.Thread(target=self._serve, name="killable", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)
        return job.result

    def close(self) -> None:
        """End the workers. A later call starts them anew."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(timeout=self._program.deadline + 1.0)

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if job.result.set_running_or_notify_cancel():
                value, error = None, None
                try:
                    worker = worker or _Worker(self._program)
                    value = worker.ask(job.arguments, self._program.deadline)
                except Exception as raised:
                    error = raised
                    if worker is not None and (not isinstance(raised, WorkerError) or not worker.alive):
                        worker.kill()
                        worker = None
                with self._lock:
                    self.kills += isinstance(error, DeadlineExceeded)
                if error is None:
                    job.result.set_result(value)
                else:
                    job.result.set_exception(error)
            with self._lock:
                self._pending -= 1
        if worker is not None:
            worker.kill()


class _Worker:
    """One process: a line of JSON in, a line of JSON out."""

    def __init__(self, program: Program) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        command = [
            sys.executable,
            "-P",
            str(_CHILD),
            str(program.file),
            program.function,
            str(program.deadline),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0
        )
        self._buffer = b""
        try:
            reply = self._receive(time.monotonic() + STARTUP_SECONDS)
        except DeadlineExceeded:
            self.kill()
            raise WorkerError(f"{program.file.name} did not start within {STARTUP_SECONDS:g} s") from None
        except WorkerError:
            self.kill()
            raise
        assert reply == {"ready": True}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, arguments: tuple[Any, ...], deadline: float) -> Any:
        assert self._process.stdin is not None
        until = time.monotonic() + deadline
        try:
            self._send(json.dumps(arguments).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        reply = self._receive(until)
        if "raised" in reply:
            raise WorkerError(reply["raised"])
        return reply["value"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        while data:
            data = data[os.write(self._process.stdin.fileno(), data) :]

    def _receive(self, until: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(until - time.monotonic(), 0.0)):
                    raise DeadlineExceeded("the worker was killed at its deadline")
                piece = os.read(stdout, 65536)
                if not piece:
                    raise WorkerError(self._last_words())
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read()[-2000:].decode(errors="replace").strip()
        return f"the worker process ended with code {code}" + (f":\n{said}" if said else "")
