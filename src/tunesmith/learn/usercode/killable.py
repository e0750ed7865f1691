"""Code in killable worker processes: far objects that are forks of a loaded program.

For work that no thread can stop: computer algebra on a model's text, regular expressions that
backtrack without end, and all user code that may hang, crash, end its process or take all memory. A
``ForkServer`` loads a program once (``killable_child.py``); its forks start in milliseconds and are
replaced when they are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tunesmith.config.values import parse_size
from tunesmith.errors import DeadlineExceeded, TunesmithError
from tunesmith.learn.usercode.calls import ANSWER_SECONDS, PerLoop, done_within
from tunesmith.learn.usercode.child import Process, ending
from tunesmith.learn.usercode.far import ConnectedFar
from tunesmith.learn.usercode.jail import Jail
from tunesmith.records.children import kill_descendants, remove_at_end
from tunesmith.records.foreign import parse_json

STARTUP_SECONDS = 60.0
ENDING_SECONDS = 10.0
IMPORT_SECONDS = 600.0
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
    """A function of a file, or the object it returns for ``arguments``, that workers call. Results
    go through JSON."""

    file: Path
    function: str
    arguments: tuple[Any, ...] | None = None
    memory: int = MEMORY_BYTES
    """Bytes that a worker may use in addition to the loaded program."""
    startup: float = STARTUP_SECONDS
    shows: bool = False
    """Whether its output appears here."""
    alone: bool = False
    """Whether there is only one worker at a time. It is then not forked if libraries have started
    threads, because a fork could use only one thread."""
    jail: Jail | None = None
    """How its workers are confined, but for the paths and the folder, which the server adds."""
    environment: Mapping[str, str] | None = None
    """Its environment variables; None: those of this process."""

    @classmethod
    def of_user(
        cls,
        path: Path,
        function: str,
        arguments: tuple[object, ...],
        memory: str | None,
        *,
        alone: bool = False,
        jail: Jail | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> UserProgram:
        """A program that loads the user's code.

        Args:
            memory: limit of each worker; None: half of the machine's memory.
        """
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        return cls(
            path,
            function,
            arguments,
            parse_size(memory) if memory else half,
            IMPORT_SECONDS,
            shows=True,
            alone=alone and jail is None,
            jail=jail,
            environment=environment,
        )


def _folder() -> str:
    """Where workers mount their own file systems: empty, and each sees its own there."""
    folder = mkdtemp(prefix="tunesmith-sandbox-")
    os.chmod(folder, 0o711)
    remove_at_end(Path(folder))
    return folder


class ForkServer:
    """A process that has loaded a program and forks workers; raises WorkerError if it cannot."""

    def __init__(self, program: UserProgram) -> None:
        self._program = program
        self._folder = _folder() if program.jail else None
        self._process = Process(
            [sys.executable, "-P", _CHILD],
            program.file.name,
            program.environment,
            shows=program.shows,
            out=True,
        )
        self._pipe = self._process.connection
        self.pid = self._process.popen.pid
        self.last_output = self._process.said
        self._lock = threading.Lock()
        self._used = False
        self._codes: dict[int, int | None] = {}
        """The exit code of each fork; None: it has not been asked for."""
        setup = {
            "file": str(program.file),
            "function": program.function,
            "arguments": program.arguments,
            "alone": program.alone,
            "path": sys.path,
            "memory": program.memory,
            "jail": program.jail and {**program.jail, "folder": self._folder},
        }
        late = f"{program.file.name} did not start within {program.startup:g} s"
        try:
            ready = self._ask(setup, program.startup, late)
        except BaseException:
            self.close()
            raise
        self.description: Any = ready["value"]
        self.forks: bool = ready["forks"]
        if program.jail and not self.forks:
            self.close()
            raise WorkerError(
                "it starts threads or uses a GPU when it is imported, so it cannot be confined in "
                "a sandbox; do that in its first call"
            )

    @property
    def alive(self) -> bool:
        return self._process.popen.poll() is None

    def worker(self) -> Worker:
        """A new worker: a fork or, if the program cannot be forked, this process, or another if
        this one is used."""
        with self._lock:
            used = self._used
            self._used = True
        if used and not self.forks:
            return ForkServer(self._program).worker()
        ours, theirs = Pipe()
        with self._lock, theirs:
            late = "no worker process could be started"
            number = self._ask("worker", STARTUP_SECONDS, late, theirs)
            if self.forks:
                self._codes[number] = None
        jail = self._program.jail
        if not jail or not jail["listens"]:
            return Worker(self, number, ours)
        try:
            return Worker(self, number, ours, socket.socket(fileno=recv_handle(ours)))
        except (EOFError, OSError, RuntimeError):
            ours.close()
            raise WorkerLost(self.end(number), self.last_output()) from None

    def end(self, number: int) -> int:
        """Kill a worker, if it has not ended. Returns its exit code."""
        if number == self.pid:
            return self._kill()
        with self._lock:
            code = self._codes[number]
            if code is None:
                try:
                    code = self._ask(number, ENDING_SECONDS, "a worker process does not end")
                except WorkerError:  # with the server, its forks end
                    code = -signal.SIGKILL
                self._codes[number] = code
        return code

    def close(self) -> None:
        """End the workers and the server; one that does not answer for ``ENDING_SECONDS`` is
        killed."""
        for number in [number for number, code in list(self._codes.items()) if code is None]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if self._lock.acquire(timeout=ENDING_SECONDS):
            self._lock.release()
        else:
            self._kill()  # the request in progress fails, and frees the lock
        for number in list(self._codes):
            self.end(number)
        with self._lock:
            self._kill()
            self._pipe.close()
        if self._folder:
            with suppress(OSError):
                os.rmdir(self._folder)

    def _kill(self) -> int:
        """Kill the server, with what the user's file started. Returns its exit code."""
        if self.alive:
            kill_descendants(self.pid)
        return self._process.kill()

    def _ask(
        self, request: object, seconds: float, late: str, connection: Connection | None = None
    ) -> Any:
        """The answer to a request, with which a connection may be sent.

        Raises:
            WorkerLost: the process has ended.
            WorkerError: with the text ``late``, if it did not answer in time; it is then killed,
                and its forks end.
        """
        try:
            self._pipe.send_bytes(pickle.dumps(request))
            if connection:
                send_handle(self._pipe, connection.fileno(), self.pid)
            if self._pipe.poll(seconds):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise WorkerLost(self._process.popen.wait(), self.last_output()) from None
        self._process.popen.kill()
        raise WorkerError(late)


class Worker(ConnectedFar):
    """One process that holds the program's function. Requests are pickled; answers are JSON, which
    cannot run code.

    No watchdog supervises it: each call has a deadline. When it ends, its calls raise WorkerLost.
    """

    def __init__(
        self,
        server: ForkServer,
        pid: int,
        connection: Connection,
        listener: socket.socket | None = None,
    ) -> None:
        super().__init__(connection, f"worker {pid}", WorkerLost, None)
        self.listener = listener
        """On which a worker in a jail listens, if it does."""
        self._server = server
        self._number = pid
        self._start()

    async def ask(
        self,
        arguments: Sequence[object],
        timeout: float,
        *,
        coroutine: bool = False,
        shared: bool = False,
    ) -> Any:
        """Call the function; the process is killed if it does not answer in time.

        Args:
            coroutine: call the program's coroutine function ``later`` instead.
            shared: other calls are in progress in the process, so only this call's coroutine is
                cancelled, as long as the event loop still answers.

        Raises:
            DeadlineExceeded: it did not answer in time.
            WorkerLost: it ended, or was killed because one of its calls blocked the event loop.
            WorkerError: it raised.
        """
        try:
            result = self.submit("later" if coroutine else "__call__", *arguments)
        except TypeError as error:
            raise WorkerError(str(error)) from error
        try:
            if await done_within(result, timeout):
                return result.result()
            if not shared:
                late = f"did not return within {timeout:g} s"
                raise DeadlineExceeded(f"{late}; its process was killed")
            self.cancel(result)
            if not await done_within(result, ANSWER_SECONDS):
                self.close()  # one of its calls, perhaps not this one, blocks the event loop
            lost = result.exception()
            if isinstance(lost, WorkerLost):
                raise lost
            raise DeadlineExceeded(f"did not return within {timeout:g} s")
        except asyncio.CancelledError:
            if shared:
                self.cancel(result)
            raise
        finally:
            if not (shared or result.done()):
                self.close()

    def _kill(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self._number == self._server.pid:
            self._server.close()
        elif self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)

    def _how_it_ended(self) -> str:
        self.code = self._server.end(self._number)
        return ending(self.code)

    def _loss(self) -> WorkerLost:
        code = -signal.SIGKILL if self.code is None else self.code
        return WorkerLost(code, self._server.last_output())

    def _decode(self, message: bytes) -> tuple[int, Any, WorkerError | None]:
        """Raises ValueError: code in the process has written something else."""
        match parse_json(message):
            case [int() as number, value, None]:
                return number, value, None
            case [int() as number, value, str() as error]:
                return number, value, WorkerError(error)
            case _:
                raise ValueError("it is no answer")


class Pool:
    """Workers of one program, in processes that can be killed. The fork server that makes them
    starts on first use.

    Args:
        deadline: seconds for a call of ``run``, not counting the worker's start.
        workers: most concurrent calls of ``run``.
        reuse: whether a worker takes another call of ``run``.
    """

    def __init__(
        self, program: UserProgram, deadline: float = inf, workers: int = 1, *, reuse: bool = True
    ) -> None:
        self._program = program
        self._deadline = deadline
        self._places = PerLoop(lambda: asyncio.Semaphore(workers))
        self._reuse = reuse
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._idle: list[Worker] = []

    def server(self) -> ForkServer:
        with self._lock:
            if self._server is None or not self._server.alive:
                self._server = ForkServer(self._program)
            return self._server

    async def take(self) -> Worker:
        """An idle worker, or a new one. If nobody waits for it any more when it has started, it is
        idle then. Raises WorkerError."""
        taking = asyncio.ensure_future(asyncio.to_thread(self._take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._untaken)
            raise

    def _untaken(self, taking: asyncio.Future[Worker]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self.give_back(taking.result())

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if not worker.lost:
                    return worker
        return self.server().worker()

    def give_back(self, worker: Worker) -> None:
        with self._lock:
            if not worker.lost:
                self._idle.append(worker)

    async def run(
        self, *arguments: object, timeout: float | None = None, coroutine: bool = False
    ) -> Any:
        """The function's result, from a worker with no other call. If the worker was killed from
        outside, the call is repeated once.

        Args:
            timeout: seconds instead of ``deadline``.
            coroutine: as in ``Worker.ask``.

        Raises:
            DeadlineExceeded: its process was killed at the deadline.
            WorkerError: it raised, or its process ended.
        """
        call = partial(self._run, arguments, timeout or self._deadline, coroutine)
        async with self._places.here:
            try:
                return await call()
            except WorkerLost as lost:
                if not lost.from_outside:
                    raise
                return await call()

    async def _run(self, arguments: Sequence[object], timeout: float, coroutine: bool) -> Any:
        worker = await self.take()
        try:
            return await worker.ask(arguments, timeout, coroutine=coroutine)
        finally:
            if self._reuse:
                self.give_back(worker)
            else:
                worker.close()

    def close(self) -> None:
        """End all idle workers and the fork server. A later ``take`` starts a new one."""
        with self._lock:
            ending = [*self._idle, *filter(None, [self._server])]
            self._server = None
            self._idle = []
        for process in ending:
            process.close()
