"""Programs in sandboxes: what is run, what comes of it, and the port that every kind implements."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tunesmith.config.sandboxes import LocalSandbox, Sandbox
from tunesmith.config.values import parse_size
from tunesmith.errors import ConfigError, TunesmithError
from tunesmith.plan.facts.hardware import usable_cpus


def refused(why: str) -> ConfigError:
    """``environment.sandbox`` is at fault."""
    return ConfigError(why, keys=("environment.sandbox",))


class SandboxError(TunesmithError, RuntimeError):
    """A sandbox could not run a program; nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """A Python program, or a command of the sandbox's own programs."""

    code: str = ""
    command: tuple[str, ...] = ()
    """Instead of ``code``."""
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts by path, from the sandbox's directory."""
    archives: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """tar files by the directory into which they are unpacked."""
    folder: str = "."
    """The working directory."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables in addition to the sandbox's."""
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that name a path; a directory, which is made, ends with a slash."""
    reads: tuple[str, ...] = ()
    """Files and directories that are read after it."""


Ended = Literal["ended", "timed_out", "flooded", "killed"]


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """How a program ended. ``killed``: by the sandbox or the kernel, as when memory runs out."""

    ended: Ended
    code: int | None = None
    stdout: str = ""
    stderr: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """What was read after it, by path."""

    @property
    def ok(self) -> bool:
        return self.ended == "ended" and self.code == 0


class SandboxRunner(Protocol):
    """Runs programs, each in a sandbox of its own."""

    async def run(self, job: SandboxJob) -> SandboxOutcome:
        """Run a program.

        Raises:
            SandboxError: it could not be run.
        """
        ...

    def close(self) -> None: ...


class Opened(Protocol):
    """A sandbox in which several programs run, one after the other."""

    @property
    def listener(self) -> socket.socket:
        """Listens on the loopback interface that its programs see."""
        ...

    async def run(self, job: SandboxJob, seconds: float) -> SandboxOutcome:
        """Run a program, and end what it leaves running; no other runs after one that did not end
        within ``seconds``.

        Raises:
            SandboxError: it could not be run.
        """
        ...


class Opener(SandboxRunner, Protocol):
    """Opens sandboxes for several programs."""

    def open(self) -> AbstractAsyncContextManager[Opened]:
        """A sandbox that ends, with all its processes, when the context does.

        Raises:
            SandboxError: it did not start.
        """
        ...


MOST_OPEN = 4096
"""Sandboxes of agents at once, where nothing is said."""


def at_once(section: Sandbox) -> int:
    """Programs that run concurrently."""
    return section.concurrency or usable_cpus()


def message_of(job: SandboxJob, section: LocalSandbox) -> dict[str, object]:
    """A job as ``code_program.run`` takes it."""
    kept = {name: os.environ[name] for name in section.env if name in os.environ}
    archives = {path: base64.b64encode(data).decode() for path, data in job.archives.items()}
    return {
        "code": job.code,
        "command": list(job.command),
        "stdin": job.stdin,
        "files": dict(job.files),
        "archives": archives,
        "folder": job.folder,
        "environment": {**kept, **job.environment},
        "places": dict(job.places),
        "reads": list(job.reads),
        "output": parse_size(section.output),
    }


def outcome_of(answer: object) -> SandboxOutcome:
    """The outcome in ``code_program.run``'s answer.

    Raises:
        SandboxError: it is none.
    """
    match answer:
        case {
            "code": int() as code,
            "stdout": str() as out,
            "stderr": str() as errors,
            "more": bool() as more,
            "files": dict() as files,
        }:
            ended: Ended = "flooded" if more else "killed" if code < 0 else "ended"
            read = {str(path): base64.b64decode(str(data)) for path, data in files.items()}
            return SandboxOutcome(ended, code, out, errors, read)
        case _:
            raise SandboxError(f"the sandbox answered {answer!r}"[:300])
