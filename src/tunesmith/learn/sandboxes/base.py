"""Programs in sandboxes: what is run, what comes of it, and the port that every kind implements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tunesmith.config.sandboxes import Sandbox
from tunesmith.errors import TunesmithError


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
    """Texts by name, in the working directory."""


Ended = Literal["ended", "timed_out", "flooded", "killed"]


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """How a program ended. ``killed``: by the sandbox or the kernel, as when memory runs out."""

    ended: Ended
    code: int | None = None
    stdout: str = ""
    stderr: str = ""

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


def at_once(section: Sandbox) -> int:
    """Programs that run concurrently."""
    return section.concurrency or max(1, os.cpu_count() or 1)


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
        }:
            ended: Ended = "flooded" if more else "killed" if code < 0 else "ended"
            return SandboxOutcome(ended, code, out, errors)
        case _:
            raise SandboxError(f"the sandbox answered {answer!r}"[:300])
