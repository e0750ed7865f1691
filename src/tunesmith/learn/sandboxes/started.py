"""``sandbox = "bubblewrap"`` and ``"docker"``: programs in sandboxes of other tools, started ahead.

Each sandbox runs ``code_program.py`` once: it waits for a job on its standard input, runs it, and
prints what came of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from tunesmith.config.sandboxes import Bubblewrap, DockerSandbox, Sandbox
from tunesmith.config.values import parse_size
from tunesmith.errors import ConfigError
from tunesmith.learn.sandboxes.base import (
    SandboxError,
    SandboxJob,
    SandboxOutcome,
    at_once,
    outcome_of,
)
from tunesmith.learn.usercode.calls import PerLoop
from tunesmith.learn.usercode.child import starter

_PROGRAM = Path(__file__).with_name("code_program.py")
NOBODY = 65534
START_SECONDS = 30.0
"""Seconds that a sandbox may take to start, in addition to its program's."""
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
    environment: Mapping[str, str] | None = None
    """Of its command, which what runs inside may see; None: this process's."""
    user: int | None = None
    """As which user, if this process is root: limits on processes do not hold for root."""


def bubblewrap(section: Bubblewrap) -> SandboxStart:
    """A sandbox by bwrap, with namespaces of its own and a file system in memory."""
    paths = (*_SYSTEM, *(_NETWORK if section.network else ()), *section.read)
    binds = [word for path in paths for word in ("--ro-bind-try", path, path)]
    limits = {
        "RLIMIT_NPROC": section.processes,
        "RLIMIT_FSIZE": parse_size(section.files),
        "RLIMIT_DATA": parse_size(section.memory),
        "RLIMIT_CORE": 0,
    }
    command = (
        "bwrap", "--unshare-all", *(("--share-net",) if section.network else ()), "--new-session",
        "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
        "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/work",
        *binds, "--proc", "/proc", "--dev", "/dev",
        "--size", str(parse_size(section.files)), "--tmpfs", "/work", "--chdir", "/work",
        "--remount-ro", "/", "--remount-ro", "/dev", "--",
        "python3", "-I", "-S", "-c", _PROGRAM.read_text(encoding="utf-8"), json.dumps(limits),
    )  # fmt: skip
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    return SandboxStart(command, environment=path, user=NOBODY if os.geteuid() == 0 else None)


def docker(section: DockerSandbox) -> SandboxStart:
    """A container that is removed when it ends."""
    name = f"tunesmith-{uuid.uuid4().hex}"
    files = parse_size(section.files)
    memory = str(parse_size(section.memory))
    command = (
        "docker", "run", "--rm", "--interactive", "--init", "--name", name,
        *(("--runtime", section.runtime) if section.runtime else ()),
        "--network", "bridge" if section.network else "none",
        "--memory", memory, "--memory-swap", memory, "--pids-limit", str(section.processes),
        "--read-only", "--tmpfs", f"/work:rw,exec,nosuid,nodev,mode=1777,size={files}",
        "--workdir", "/work", "--env", "HOME=/work", "--env", "TMPDIR=/work",
        "--user", f"{NOBODY}:{NOBODY}", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--ulimit", "core=0", "--ulimit", f"fsize={files}",
        section.image,
        "python3", "-I", "-S", "-c", _PROGRAM.read_text(encoding="utf-8"), "{}",
    )  # fmt: skip
    return SandboxStart(command, ("docker", "kill", name))


class StartedRunner:
    """Keeps as many started sandboxes as programs may run at once; each runs one program.

    Raises:
        ConfigError: the tool is not installed.
    """

    def __init__(self, section: Sandbox, start: Callable[[], SandboxStart]) -> None:
        tool = start().command[0]
        if shutil.which(tool) is None:
            raise ConfigError(
                f"environment.sandbox = '{section.name}' needs {tool}, which is not installed",
                keys=("environment.sandbox",),
            )
        self._section = section
        self._start = start
        self._places = PerLoop(lambda: asyncio.Semaphore(at_once(section)))
        self._lock = threading.Lock()
        self._waiting: list[_Started] = []
        self._busy: list[_Started] = []

    async def run(self, job: SandboxJob) -> SandboxOutcome:
        async with self._places.here:
            return await asyncio.to_thread(self._run, job)

    def close(self) -> None:
        """End all sandboxes."""
        with self._lock:
            sandboxes = [*self._waiting, *self._busy]
            self._waiting = []
        for sandbox in sandboxes:
            sandbox.end()

    def _run(self, job: SandboxJob) -> SandboxOutcome:
        section = self._section
        output = parse_size(section.output)
        given = {
            "code": job.code,
            "command": list(job.command),
            "stdin": job.stdin,
            "files": dict(job.files),
            "output": output,
            "seconds": ceil(section.seconds),
        }
        sandbox = self._take()
        try:
            limit = section.seconds + START_SECONDS
            out = sandbox.talk(json.dumps(given).encode(), 16 * output + 4096, limit)
            code = None if out else sandbox.code()
        finally:
            with self._lock:
                self._busy.remove(sandbox)
            sandbox.end()
        if code is None:
            return outcome_of(_parsed(out))
        if sandbox.late or code in _ALARMED:
            return SandboxOutcome("timed_out")
        if code < 0 or code in _KILLED:
            return SandboxOutcome("killed", code)
        raise SandboxError(f"{sandbox.start.command[0]} ended with exit code {code}")

    def _take(self) -> _Started:
        """A sandbox that has been started, while the next one starts."""
        with self._lock:
            sandbox = self._waiting.pop() if self._waiting else _Started(self._start())
            if len(self._waiting) < at_once(self._section):
                self._waiting.append(_Started(self._start()))
            self._busy.append(sandbox)
        return sandbox


class _Started:
    """A sandbox that waits for its job."""

    def __init__(self, start: SandboxStart) -> None:
        self.start = start
        self.late = False
        # bwrap ends with the thread that started it.
        self._process: Popen[bytes] = starter.submit(
            Popen,
            start.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd="/",
            env=start.environment,
            user=start.user,
            group=start.user,
            start_new_session=True,
        ).result()

    def talk(self, job: bytes, most: int, seconds: float) -> bytes:
        """What it prints, of which ``most`` bytes are read; ended after so many seconds."""
        given = self._process.stdin
        said = self._process.stdout
        assert given is not None and said is not None
        timer = threading.Timer(seconds, self._overrun)
        timer.start()
        try:
            with suppress(OSError):
                given.write(job)
                given.close()
            return said.read(most)
        finally:
            timer.cancel()

    def code(self) -> int:
        return self._process.wait()

    def end(self) -> None:
        running = self._process.poll() is None
        self._process.kill()
        if running and self.start.end:
            subprocess.Popen(self.start.end, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe:
                    pipe.close()

    def _overrun(self) -> None:
        self.late = True
        self._process.kill()


def _parsed(out: bytes) -> object:
    try:
        return json.loads(out)
    except ValueError:
        return out.decode(errors="replace")
