"""Calling code in worker processes, which can be killed.

For work that no thread can stop: computer algebra on what a model wrote, regular expressions that backtrack without
end, and all code of the user's that may hang, crash, end its process or eat memory. A ``Host`` loads a program once;
its workers are forks of it (``killable_child.py``), which start in milliseconds and are replaced after a kill.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from tunesmith.errors import DeadlineExceeded, TunesmithError

STARTUP_SECONDS = 60.0
MEMORY_BYTES = 4 << 30
_CHILD = Path(__file__).with_name("killable_child.py")
_starter = ThreadPoolExecutor(1, "starter")
"""Starts all hosts, because the kernel ends them with the thread that did."""


class WorkerError(TunesmithError, RuntimeError):
    """A worker process raised, died or could not start."""


class WorkerLost(WorkerError):
    """A worker process ended. ``code`` is its exit code, negative where a signal ended it."""

    def __init__(self, code: int, said: str = "") -> None:
        how = f"was ended by {signal.Signals(-code).name}" if _is_signal(-code) else f"ended with exit code {code}"
        super().__init__(f"the worker process {how}" + (f":\n{said}" if said else ""))
        self.code = code

    @property
    def from_outside(self) -> bool:
        """Whether it was killed, as the kernel does when memory runs out."""
        return self.code == -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Program:
    """What workers run: a function of a file, or what it gives for ``arguments``. Results must survive JSON.

    A callable with a method ``concurrent(*arguments)`` says of each call whether it gives a coroutine.
    """

    file: Path
    function: str
    deadline: float = 0.0
    """Seconds for one call of a ``KillablePool``, not counting the worker's start."""
    arguments: tuple[Any, ...] | None = None
    memory: int = MEMORY_BYTES
    """Bytes that a worker may have on top of what was loaded."""
    startup: float = STARTUP_SECONDS
    shows: bool = False
    """Whether what it prints is printed here."""
    alone: bool = False
    """Whether there is one worker at a time, which is then no fork where libraries have started threads: it could use
    only one thread."""


class Host:
    """A process that has loaded a program; raises WorkerError where it cannot."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._pipe, theirs = Pipe()
        end, out = theirs.fileno(), subprocess.PIPE
        command = [sys.executable, "-P", _CHILD, str(end), str(os.getpid())]
        self._process: subprocess.Popen[bytes] = _starter.submit(
            subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=[end], bufsize=0
        ).result()
        theirs.close()
        self._said: deque[str] = deque(maxlen=40)
        self._readers = [self._forward(self._process.stdout, False), self._forward(self._process.stderr, True)]
        setup = {"file": str(program.file), "function": program.function, "arguments": program.arguments}
        self._lock = threading.Lock()
        self._used = False
        self._forked: SimpleQueue[int | None] = SimpleQueue()
        self._codes: dict[int, Future[int]] = {}
        try:
            with suppress(OSError):
                self._pipe.send_bytes(pickle.dumps({**setup, "alone": program.alone, "path": sys.path}))
            self._ready(program)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._listen, name="host", daemon=True).start()

    def _ready(self, program: Program) -> None:
        if not self._pipe.poll(program.startup):
            raise WorkerError(f"{program.file.name} did not start within {program.startup:g} s")
        try:
            ready = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise WorkerLost(self._process.wait(), self.said()) from None
        self.description: Any = ready["value"]
        self.forks: bool = ready["forks"]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        """What it and its workers printed last."""
        if not self.alive:
            for reader in self._readers:
                reader.join(1.0)
        return "".join(self._said)[-2000:].strip()

    def worker(self) -> Worker:
        """A new worker: a fork, or where the program cannot be forked this process or, once that is used, another."""
        if not self.forks:
            with self._lock:
                alone, self._used = (Host(self._program) if self._used else self), True
            return Worker(alone, alone._order(fork=False), alone.close)
        return Worker(self, self._order(fork=True))

    def _order(self, *, fork: bool) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        with self._lock:
            try:
                self._pipe.send_bytes(pickle.dumps({"fork": fork, "memory": self._program.memory}))
                send_handle(self._pipe, theirs.fileno(), self._process.pid)
            except OSError:
                raise WorkerLost(self._process.wait(), self.said()) from None
            finally:
                theirs.close()
            try:
                number = self._forked.get(timeout=STARTUP_SECONDS) if fork else self._process.pid
            except Empty:
                raise WorkerError("no worker process could be started") from None
        if number is None:
            raise WorkerLost(self._process.wait(), self.said())
        if fork:
            self._codes.setdefault(number, Future())
        return number, ours

    def code_of(self, number: int) -> int:
        """The exit code of a worker that has ended or is about to."""
        if number == self._process.pid:
            return self._process.wait()
        code = self._codes.setdefault(number, Future())
        if self.alive:
            with suppress(TimeoutError):
                code.result(5.0)
        return code.result() if code.done() else -signal.SIGKILL

    def close(self) -> None:
        """End it and its workers, which it has to be there to bury."""
        for number, code in list(self._codes.items()):
            if not code.done():
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        for number in list(self._codes):
            self.code_of(number)
        self._process.kill()
        self._process.wait()
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

    def _forward(self, pipe: IO[bytes] | None, error: bool) -> threading.Thread:
        """Print what comes, through ``sys.stdout`` or ``sys.stderr`` as they are then, and keep the end of it."""

        def read() -> None:
            assert pipe is not None
            with pipe:
                for line in iter(pipe.readline, b""):
                    text = line.decode(errors="replace")
                    self._said.append(text)
                    if self._program.shows:
                        with suppress(OSError, ValueError):
                            print(text, end="", file=sys.stderr if error else sys.stdout, flush=True)

        thread = threading.Thread(target=read, name="output", daemon=True)
        thread.start()
        return thread


class Worker:
    """One process, asked through a pipe; calls may overlap."""

    def __init__(self, host: Host, made: tuple[int, Connection], on_kill: Callable[[], None] = lambda: None) -> None:
        self._host, (self.pid, self._pipe), self._on_kill = host, made, on_kill
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._sending: SimpleQueue[bytes | None] = SimpleQueue()
        self.alive = True
        for work in (self._listen, self._send):
            threading.Thread(target=work, name="worker", daemon=True).start()

    def ask(self, *arguments: Any) -> tuple[int, Future[Any]]:
        """The call's number, and its result; the future raises WorkerError, or WorkerLost where the process ended."""
        number, result = next(self._numbers), Future[Any]()
        result.set_running_or_notify_cancel()
        try:
            message = pickle.dumps((number, pickle.dumps(arguments)))
        except Exception as error:
            raise WorkerError(f"what the call is given cannot go to another process: {error}") from error
        with self._lock:
            self._asked[number] = result
            alive = self.alive
            self._sending.put(message)
        if not alive:
            self._lose()
        return number, result

    def cancel(self, number: int) -> None:
        """Of a coroutine: its future then raises WorkerError, if the worker still answers."""
        self._sending.put(pickle.dumps((number, None)))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.alive = False
        self._on_kill()

    def _send(self) -> None:
        """On a thread of its own: a worker that is stuck in native code reads nothing, and a full pipe blocks."""
        with self._pipe, suppress(OSError):
            for message in iter(self._sending.get, None):
                self._pipe.send_bytes(message)

    def _listen(self) -> None:
        while True:
            try:
                answer = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError, ValueError):
                break
            with self._lock:
                result = self._asked.pop(answer["id"], None)
            if result is None:
                continue
            if "raised" in answer:
                result.set_exception(WorkerError(answer["raised"]))
            else:
                result.set_result(answer["value"])
        self._lose()

    def _lose(self) -> None:
        lost = WorkerLost(self._host.code_of(self.pid), self._host.said())
        with self._lock:
            self.alive = False
            asked, self._asked = self._asked, {}
        self._sending.put(None)
        for result in asked.values():
            result.set_exception(lost)


class Workers:
    """Workers of one program: those that are idle, and a host for more, each started on first use."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._host: Host | None = None
        self._idle: list[Worker] = []

    def host(self) -> Host:
        with self._lock:
            if self._host is None or not self._host.alive:
                self._host = Host(self._program)
            return self._host

    def take(self) -> Worker:
        """An idle worker, or a new one. Raises WorkerError."""
        with self._lock:
            while self._idle:
                if (worker := self._idle.pop()).alive:
                    return worker
        return self.host().worker()

    def give_back(self, worker: Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)

    def close(self) -> None:
        """End the idle workers and the host, and with it all others. A later ``take`` starts anew."""
        with self._lock:
            host, self._host, idle, self._idle = self._host, None, self._idle, []
        for worker in idle:
            worker.kill()
        if host is not None:
            host.close()


class KillablePool:
    """Up to ``workers`` processes of one program, one call each at a time; ends with ``close``."""

    def __init__(self, program: Program, workers: int = 1) -> None:
        self._program, self._max = program, workers
        self._workers = Workers(program)
        self._threads = ThreadPoolExecutor(workers, "killable")

    def submit(self, *arguments: Any) -> Future[Any]:
        """Run the function on these arguments.

        The future raises ``DeadlineExceeded`` if the call was killed, ``WorkerError`` if it raised or its
        process died. A process that was killed from outside is replaced and the call made again, once.
        """
        return self._threads.submit(self._call, arguments)

    def close(self) -> None:
        """End the workers, after the calls that they are at. A later call starts them anew."""
        self._threads.shutdown(cancel_futures=True)
        self._threads = ThreadPoolExecutor(self._max, "killable")
        self._workers.close()

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        try:
            return self._call_once(arguments)
        except WorkerLost as lost:
            if not lost.from_outside:
                raise
            return self._call_once(arguments)

    def _call_once(self, arguments: tuple[Any, ...]) -> Any:
        worker = self._workers.take()
        try:
            return worker.ask(*arguments)[1].result(self._program.deadline)
        except TimeoutError:
            worker.kill()
            raise DeadlineExceeded("the worker was killed at its deadline") from None
        finally:
            self._workers.give_back(worker)


def _is_signal(number: int) -> bool:
    return number in signal.Signals.__members__.values()
