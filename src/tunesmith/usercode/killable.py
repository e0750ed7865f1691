"""Code in killable worker processes: remote objects that are forks of a loaded program.

For work that no thread can stop: computer algebra on a model's text, regular expressions that backtrack without end,
and all user code that may hang, crash, end its process or take all memory. A ``ForkServer`` loads a program once
(``killable_child.py``); its forks start in milliseconds and are replaced when they are killed.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tunesmith.distributed.child import Process, ending
from tunesmith.distributed.far import ConnectedFar, PendingResult
from tunesmith.errors import TunesmithError

STARTUP_SECONDS = 60.0
MEMORY_BYTES = 4 << 30
_CHILD = Path(__file__).with_name("killable_child.py")


class WorkerError(TunesmithError, RuntimeError):
    """A worker process raised, died or could not start."""


class WorkerLost(WorkerError):
    """A worker process ended. ``code`` is its exit code, negative if a signal ended it."""

    def __init__(self, code: int, output: str = "") -> None:
        super().__init__(f"the worker process {ending(code)}" + (f":\n{output}" if output else ""))
        self.code = code

    @property
    def from_outside(self) -> bool:
        """Whether it was killed, as the kernel does when memory runs out."""
        return self.code == -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class UserProgram:
    """A function of a file, or the object it returns for ``arguments``, that workers call. Results go through JSON."""

    file: Path
    function: str
    arguments: tuple[Any, ...] | None = None
    memory: int = MEMORY_BYTES
    """Bytes that a worker may use in addition to the loaded program."""
    startup: float = STARTUP_SECONDS
    shows: bool = False
    """Whether its output appears here."""
    alone: bool = False
    """Whether there is only one worker at a time. It is then not forked if libraries have started threads, because a
    fork could use only one thread."""


class ForkServer:
    """A process that has loaded a program and forks workers; raises WorkerError if it cannot."""

    def __init__(self, program: UserProgram) -> None:
        self._program = program
        self._process = Process([sys.executable, "-P", _CHILD], program.file.name, shows=program.shows, out=True)
        self._pipe, self.pid = self._process.connection, self._process.popen.pid
        self.last_output = self._process.said
        self._lock = threading.Lock()
        self._used = False
        self._forked: SimpleQueue[int | None] = SimpleQueue()
        self._codes: dict[int, Future[int]] = {}
        setup = {"file": str(program.file), "function": program.function, "arguments": program.arguments}
        try:
            with suppress(OSError):
                self._pipe.send_bytes(pickle.dumps({**setup, "alone": program.alone, "path": sys.path}))
            if not self._pipe.poll(program.startup):
                raise WorkerError(f"{program.file.name} did not start within {program.startup:g} s")
            try:
                ready = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._loss() from None
        except BaseException:
            self.close()
            raise
        self.description: Any = ready["value"]
        self.forks: bool = ready["forks"]
        threading.Thread(target=self._listen, name="fork server", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.popen.poll() is None

    def worker(self) -> Worker:
        """A new worker: a fork or, if the program cannot be forked, this process, or another if this one is used."""
        if self.forks:
            return Worker(self, *self._order(fork=True))
        with self._lock:
            server, self._used = (ForkServer(self._program) if self._used else self), True
        return Worker(server, *server._order(fork=False), server.close)

    def _order(self, *, fork: bool) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        with self._lock:
            try:
                self._pipe.send_bytes(pickle.dumps({"fork": fork, "memory": self._program.memory}))
                send_handle(self._pipe, theirs.fileno(), self.pid)
            except OSError:
                raise self._loss() from None
            finally:
                theirs.close()
            try:
                number = self._forked.get(timeout=STARTUP_SECONDS) if fork else self.pid
            except Empty:
                raise WorkerError("no worker process could be started") from None
        if number is None:
            raise self._loss()
        if fork:
            self._codes.setdefault(number, Future())
        return number, ours

    def _loss(self) -> WorkerLost:
        return WorkerLost(self._process.popen.wait(), self.last_output())

    def code_of(self, number: int) -> int:
        """The exit code of a worker that has ended or is about to."""
        if number == self.pid:
            return self._process.popen.wait()
        code = self._codes.setdefault(number, Future())
        if self.alive:
            with suppress(TimeoutError):
                code.result(5.0)
        return code.result() if code.done() else -signal.SIGKILL

    def close(self) -> None:
        """End the workers, collect their exit codes, and end the server."""
        for number, code in list(self._codes.items()):
            if not code.done():
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        for number in list(self._codes):
            self.code_of(number)
        self._process.kill()
        self._pipe.close()

    def _listen(self) -> None:
        try:
            while True:
                message = json.loads(self._pipe.recv_bytes())
                if "forked" in message:
                    self._forked.put(message["forked"])
                else:
                    self._codes.setdefault(message["ended"], Future()).set_result(message["code"])
        except (EOFError, OSError, ValueError):
            self._forked.put(None)
            for code in list(self._codes.values()):
                if not code.done():
                    code.set_result(-signal.SIGKILL)


class Worker(ConnectedFar):
    """One process that holds the program's function. Requests are pickled; answers are JSON, which cannot run code.

    No watchdog supervises it: the caller sets a deadline and kills it. When it ends, its calls raise WorkerLost.
    """

    def __init__(
        self, server: ForkServer, pid: int, connection: Connection, on_kill: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(connection, f"worker {pid}", WorkerLost, None, json.loads)
        self._server, self._number, self._on_kill = server, pid, on_kill
        self.alive = True
        self._start()

    def ask(self, *arguments: Any, coroutine: bool = False) -> PendingResult:
        """Call the function. The answer raises WorkerError if the function raised."""
        return (self.submit_async if coroutine else self.submit)("__call__", *arguments)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)
        self.alive = False
        self._on_kill()

    def _kill(self) -> None:
        self._connection.close()
        self.alive = False

    def _how_it_ended(self) -> str:
        self.code = self._server.code_of(self._number)
        return ending(self.code)

    def _loss(self) -> WorkerLost:
        return WorkerLost(-signal.SIGKILL if self.code is None else self.code, self._server.last_output())

    def _raised(self, value: Any) -> WorkerError:
        return WorkerError(value)

    def _refusal(self, text: str) -> WorkerError:
        return WorkerError(text)


class Workers:
    """Workers of one program: the idle ones, and a fork server for more, which starts on first use."""

    def __init__(self, program: UserProgram) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._idle: list[Worker] = []

    def server(self) -> ForkServer:
        with self._lock:
            if self._server is None or not self._server.alive:
                self._server = ForkServer(self._program)
            return self._server

    def take(self) -> Worker:
        """An idle worker, or a new one. Raises WorkerError."""
        with self._lock:
            while self._idle:
                if (worker := self._idle.pop()).alive:
                    return worker
        return self.server().worker()

    def give_back(self, worker: Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)

    def close(self) -> None:
        """End all workers and the fork server. A later ``take`` starts a new one."""
        with self._lock:
            server, self._server, idle, self._idle = self._server, None, self._idle, []
        for worker in idle:
            worker.kill()
        if server is not None:
            server.close()
