"""A far object in a child process, which may run in another Python environment."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tunesmith.learn.usercode.far import PATIENCE, ConnectedFar, Lost

_HOST = Path(__file__).with_name("host.py")
PIPE_BYTES = 1 << 16
"""What a pipe can hold."""
starter = ThreadPoolExecutor(1, "starter")
"""Starts all children, because the kernel kills a child when the thread that started it ends."""
start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
"""What starts a child: the tests' forks a process that has imported what children import."""


class Process:
    """A process with a connection, whose output is shown here and whose last lines are kept.

    Args:
        command: gets the connection's descriptor, this process's id and ``name`` as further
            arguments.
        shows: whether its output appears here; ``out``: its standard output on standard output.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        name: str,
        environment: Mapping[str, str] | None = None,
        *,
        shows: bool = True,
        out: bool = False,
    ) -> None:
        self.connection, theirs = Pipe()
        end = theirs.fileno()
        pipe = subprocess.PIPE
        self._shows = shows
        arguments = [*command, str(end), str(os.getpid()), name]
        self.popen: subprocess.Popen[bytes] = starter.submit(
            start_process,
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[end],
            bufsize=0,
            env=environment,
        ).result()
        theirs.close()
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self._pipes = (self.popen.stdout, self.popen.stderr)
        self._out = self.popen.stdout.fileno() if out else None
        self._lines: deque[str] = deque(maxlen=40)
        self._reading = threading.Lock()
        self._rest = {pipe.fileno(): b"" for pipe in self._pipes}
        """The unfinished line of each pipe that is still open, by file descriptor."""
        threading.Thread(target=self._forward, name="output", daemon=True).start()

    def said(self) -> str:
        """The last lines that the process and its children printed before this call."""
        self._read()
        rest = b"".join(self._rest.values()).decode(errors="replace")
        return ("".join(self._lines) + rest)[-2000:].strip()

    def kill(self) -> int:
        """Kill it, if it has not ended, and show the rest of its output; returns the exit code."""
        self.popen.kill()
        code = self.popen.wait()
        self._read()
        return code

    def _forward(self) -> None:
        """Show its output as it comes. A process that it started may hold the pipes open after its
        end."""
        while self._rest:
            wait(list(self._rest))
            self._read()
        for pipe in self._pipes:
            pipe.close()

    def _read(self) -> None:
        """Take what the pipes hold, whether or not the thread that forwards it has run."""
        with self._reading:
            for pipe in (pipe for pipe in list(self._rest) if wait([pipe], 0)):
                data = os.read(pipe, PIPE_BYTES)
                *lines, rest = (self._rest[pipe] + data).split(b"\n")
                if data:
                    self._rest[pipe] = rest
                else:  # it has ended
                    lines += [rest] if rest else []
                    del self._rest[pipe]
                for line in lines:
                    self._show(line.decode(errors="replace") + "\n", error=pipe != self._out)

    def _show(self, line: str, *, error: bool) -> None:
        """Keep a line, and print it to the current ``sys.stdout`` or ``sys.stderr``."""
        self._lines.append(line)
        if self._shows:
            with suppress(OSError, ValueError):
                print(line, end="", file=sys.stderr if error else sys.stdout, flush=True)


class ChildProcess(ConnectedFar):
    """A far object in a child process. Its output appears on standard error here.

    The child ends when this process does. It ignores the terminal's signals: this process ends it.

    Args:
        python: the interpreter of another environment that has Tunesmith.
        environment: its environment variables; None: those of this process.
    """

    def __init__(
        self,
        name: str,
        lost: Lost,
        *,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._process = Process([python or sys.executable, "-P", _HOST], name, environment)
        connection: Connection = self._process.connection
        super().__init__(connection, f"{name} (process {self._process.popen.pid})", lost, patience)
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(None if python else sys.path))
        self._start()

    def _kill(self) -> None:
        self._process.kill()

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.code = self._process.popen.wait(10.0)
        lines = self._process.said().splitlines()[-5:]
        how = ending(self._process.kill()) + ("; it wrote last:" if lines else "")
        return "\n  ".join([how, *lines])


def ending(code: int) -> str:
    """How a process ended, in words."""
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
