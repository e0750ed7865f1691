"""``sandbox = "bubblewrap"`` and ``"docker"``: programs in sandboxes of other tools, started ahead.

Each sandbox runs ``code_program.py``, which waits for jobs on its standard input, runs them one
after the other, and prints what came of each.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from tunesmith.config.sandboxes import Bubblewrap, DockerSandbox, LocalSandbox
from tunesmith.config.values import parse_size
from tunesmith.errors import boundary
from tunesmith.learn.sandboxes.base import (
    MOST_OPEN,
    SandboxError,
    SandboxJob,
    SandboxOutcome,
    at_once,
    message_of,
    outcome_of,
    refused,
)
from tunesmith.learn.sandboxes.outlet import Outlet
from tunesmith.learn.usercode.calls import PerLoop
from tunesmith.learn.usercode.child import starter
from tunesmith.records.foreign import json_or

_PROGRAM = Path(__file__).with_name("code_program.py")
NOBODY = 65534
START_SECONDS = 30.0
"""Seconds that a sandbox may take to start, in addition to its program's."""
LONGEST = 1e6
"""Seconds of a program that its episode ends."""
_SAID = 2000
"""Bytes of a tool's complaint that are shown."""
_ALARMED = (-14, 142)
_KILLED = (137,)
"""Exit codes after signals, as a process of this machine or a tool reports them."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl")


@dataclass(frozen=True, slots=True)
class SandboxStart:
    """How a sandbox is started, and how it is ended if that is not enough to end its command."""

    command: tuple[str, ...]
    end: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    """Fails where no sandbox can be started."""
    environment: Mapping[str, str] | None = None
    """Environment variables of the command, which programs inside may see; None: those of this
    process."""
    user: int | None = None
    """As which user, if this process is root: limits on processes do not hold for root."""


def bubblewrap(section: Bubblewrap, folders: Sequence[str] = (), outlet: str = "") -> SandboxStart:
    """A sandbox by bwrap, with namespaces of its own and a file system in memory.

    Args:
        folders: directories in memory, besides its own.
        outlet: the address to which it hands the socket that it listens on; empty: it does not.
    """
    paths = (*_SYSTEM, *(_NETWORK if section.network or outlet else ()), *section.read)
    paths = (*paths, os.path.dirname(outlet)) if outlet else paths
    binds = [word for path in paths for word in ("--ro-bind-try", path, path)]
    files = str(parse_size(section.files))
    limits = {
        "RLIMIT_NPROC": section.processes,
        "RLIMIT_FSIZE": parse_size(section.files),
        "RLIMIT_DATA": parse_size(section.memory),
        "RLIMIT_CORE": 0,
    }
    command = (
        "bwrap", "--unshare-all", *(("--share-net",) if section.network else ()), "--new-session",
        "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
        "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/work",
        *binds, "--proc", "/proc", "--dev", "/dev",
        *(word for folder in ("/work", *folders) for word in ("--size", files, "--tmpfs", folder)),
        "--chdir", "/work",
        "--remount-ro", "/", "--remount-ro", "/dev", "--",
        "python3", "-I", "-S", "-c", _PROGRAM.read_text(encoding="utf-8"), json.dumps(limits),
        outlet,
    )  # fmt: skip
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    return SandboxStart(command, environment=path, user=NOBODY if os.geteuid() == 0 else None)


def docker(section: DockerSandbox, folders: Sequence[str] = (), outlet: str = "") -> SandboxStart:
    """A container that is removed when it ends; ``outlet`` as for ``bubblewrap``.

    With ``folders`` its programs are root's, and write where they like in the image's file system.
    """
    name = f"tunesmith-{uuid.uuid4().hex}"
    files = parse_size(section.files)
    memory = str(parse_size(section.memory))
    folder = os.path.dirname(outlet)
    owner = 0 if folders else NOBODY
    command = (
        "docker", "run", "--rm", "--interactive", "--name", name,
        *(("--volume", f"{folder}:{folder}:ro") if outlet else ()),
        *(("--runtime", section.runtime) if section.runtime else ()),
        "--network", "bridge" if section.network else "none",
        "--memory", memory, "--memory-swap", memory, "--pids-limit", str(section.processes),
        *(() if folders else ("--read-only", "--user", f"{owner}:{owner}")),
        # With an owner, because runc takes the mode of the directory that is there already.
        "--tmpfs", f"/work:rw,exec,nosuid,nodev,mode=1777,uid={owner},gid={owner},size={files}",
        "--workdir", "/work", "--env", "HOME=/work", "--env", "TMPDIR=/work",
        "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--ulimit", "core=0", "--ulimit", f"fsize={files}",
        section.image,
        "python3", "-I", "-S", "-c", _PROGRAM.read_text(encoding="utf-8"), "{}", outlet,
    )  # fmt: skip
    return SandboxStart(command, ("docker", "kill", name), ("docker", "version"))


class StartedRunner:
    """Keeps as many started sandboxes as programs may run at once.

    Args:
        start: how to start one; gets the address of an ``Outlet``, or nothing.
        listens: whether each listens on a loopback interface of its own.

    Raises:
        ConfigError: the tool is not installed, or not ready.
    """

    def __init__(
        self, section: LocalSandbox, start: Callable[[str], SandboxStart], *, listens: bool = False
    ) -> None:
        first = start("")
        tool = first.command[0]
        problem = "is not installed" if shutil.which(tool) is None else _problem(first.check)
        if problem:
            raise refused(f"environment.sandbox = '{section.name}' needs {tool}, which {problem}")
        self._section = section
        self._start = start
        self._listens = listens
        most = section.concurrency or MOST_OPEN if listens else at_once(section)
        self._places = PerLoop(lambda: asyncio.Semaphore(most))
        # A thread waits for each program, and the event loop's few are needed for new weights.
        self._threads = ThreadPoolExecutor(most, "sandbox")
        self._lock = threading.Lock()
        self._waiting: list[_Started] = []
        self._busy: list[_Started] = []

    async def run(self, job: SandboxJob) -> SandboxOutcome:
        async with self.open() as sandbox:
            return await sandbox.run(job, self._section.program_seconds)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[_Started]:
        async with self._places.here:
            loop = asyncio.get_running_loop()
            sandbox = await loop.run_in_executor(self._threads, self._take)
            try:
                await loop.run_in_executor(self._threads, sandbox.meet)
                yield sandbox
            finally:
                with self._lock:
                    self._busy.remove(sandbox)
                sandbox.end()

    def close(self) -> None:
        """End all sandboxes."""
        with self._lock:
            sandboxes = [*self._waiting, *self._busy]
            self._waiting = []
        for sandbox in sandboxes:
            sandbox.end()

    def _take(self) -> _Started:
        """A sandbox that has been started, while the next one starts."""
        with self._lock:
            sandbox = self._waiting.pop() if self._waiting else self._made()
            if len(self._waiting) < at_once(self._section):
                with suppress(SandboxError):  # it is made when it is needed
                    self._waiting.append(self._made())
            self._busy.append(sandbox)
        return sandbox

    def _made(self) -> _Started:
        with boundary(SandboxError, "a sandbox could not be started", OSError):
            outlet = Outlet() if self._listens else None
            return _Started(self._section, self._start, outlet, self._threads)


class _Started:
    """A sandbox that waits for its jobs."""

    def __init__(
        self,
        section: LocalSandbox,
        start: Callable[[str], SandboxStart],
        outlet: Outlet | None,
        threads: Executor,
    ) -> None:
        self.start = start(outlet.address if outlet else "")
        self._section = section
        self._outlet = outlet
        self._threads = threads
        self._listener: socket.socket | None = None
        self._late = False
        # bwrap ends with the thread that started it.
        self._process: Popen[bytes] = starter.submit(
            Popen,
            self.start.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd="/",
            env=self.start.environment,
            user=self.start.user,
            group=self.start.user,
            start_new_session=True,
        ).result()

    @property
    def listener(self) -> socket.socket:
        assert self._listener is not None
        return self._listener

    def meet(self) -> None:
        """Wait for what it listens on; a SandboxError if it does not start."""
        if self._outlet is None:
            return
        self._listener = self._outlet.take(lambda: self._process.poll() is None)
        if self._listener is None:
            self._process.kill()
            raise SandboxError(f"{self.start.command[0]} did not start, and {self._ending()}")

    async def run(self, job: SandboxJob, seconds: float) -> SandboxOutcome:
        message = {**message_of(job, self._section), "seconds": ceil(min(seconds, LONGEST))}
        work = partial(self._run, json.dumps(message).encode(), seconds)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def end(self) -> None:
        running = self._process.poll() is None
        self._process.kill()
        if running and self.start.end:
            subprocess.Popen(self.start.end, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError, ValueError):
                if pipe:
                    pipe.close()
        if self._outlet:
            self._outlet.close()

    def _run(self, message: bytes, seconds: float) -> SandboxOutcome:
        answer = self._talk(message + b"\n", min(seconds, LONGEST) + START_SECONDS)
        if answer:
            return outcome_of(json_or(answer, answer.decode(errors="replace")))
        code = self._process.wait()
        if self._late or code in _ALARMED:
            return SandboxOutcome("timed_out")
        if code < 0 or code in _KILLED:
            return SandboxOutcome("killed", code)
        raise SandboxError(f"{self.start.command[0]} {self._ending()}")

    def _talk(self, message: bytes, seconds: float) -> bytes:
        """The program's answer; it is ended after ``seconds``."""
        asked = self._process.stdin
        said = self._process.stdout
        assert asked is not None and said is not None
        timer = threading.Timer(seconds, self._overrun)
        timer.start()
        try:
            with suppress(OSError):
                asked.write(message)
                asked.flush()
            # Output as JSON, files as base64.
            sizes = 16 * parse_size(self._section.output) + 2 * parse_size(self._section.files)
            return said.readline(sizes + 2**20)
        finally:
            timer.cancel()

    def _ending(self) -> str:
        """What is known of its end, with what the tool said."""
        code = self._process.wait()
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = (self._process.stderr.read(_SAID) or b"").decode(errors="replace").strip()
        return f"ended with exit code {code}" + (f": {said}" if said else "")

    def _overrun(self) -> None:
        self._late = True
        self._process.kill()


def _problem(check: tuple[str, ...]) -> str:
    """What a command that has to succeed says if it fails."""
    if not check:
        return ""
    try:
        done = subprocess.run(check, stdin=DEVNULL, capture_output=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        return f"does not answer within {START_SECONDS:g} s"
    said = done.stderr.decode(errors="replace").strip()
    return f"says: {said[-_SAID:]}" if done.returncode else ""
