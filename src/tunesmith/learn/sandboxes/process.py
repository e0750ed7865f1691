"""``sandbox = "process"``: forks of a loaded interpreter that Linux confines; see
``usercode.jail``."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.sandboxes import ProcessSandbox
from tunesmith.config.values import parse_size
from tunesmith.errors import DeadlineExceeded
from tunesmith.learn.sandboxes.base import (
    MOST_OPEN,
    Opened,
    SandboxError,
    SandboxJob,
    SandboxOutcome,
    at_once,
    message_of,
    outcome_of,
    refused,
)
from tunesmith.learn.usercode.calls import PerLoop
from tunesmith.learn.usercode.jail import Jail, missing
from tunesmith.learn.usercode.killable import Pool, UserProgram, Worker, WorkerError, WorkerLost

_PROGRAM = Path(__file__).with_name("code_program.py")
_KEPT = ("PATH", "LANG", "LANGUAGE", "TZ", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def jail_of(section: ProcessSandbox, hidden: Sequence[Path] = ()) -> Jail:
    """How a process is confined, but for the paths that the loaded program imports from.

    Args:
        hidden: directories of which only Python files can be read, besides the working directory.

    Raises:
        ConfigError: this machine cannot confine processes.
    """
    why = missing()
    if why:
        raise refused(
            f"environment.sandbox = 'process' cannot confine processes on this machine: {why}. "
            "Use 'bubblewrap', 'docker' or 'http' for programs."
        )
    return {
        "read": list(section.read),
        "names": [],
        "folder": "",
        "hidden": [os.getcwd(), *map(str, hidden)],
        "files": parse_size(section.files),
        "processes": section.processes,
        "network": section.network,
        "listens": False,
    }


def environment_of(section: ProcessSandbox) -> dict[str, str]:
    """The environment variables of a confined process: no secrets but those in ``env``."""
    kept = {name: text for name, text in os.environ.items() if name in (*_KEPT, *section.env)}
    locale = {name: text for name, text in os.environ.items() if name.startswith("LC_")}
    return {**kept, **locale, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}


class ProcessRunner:
    """Runs programs in confined forks of one process, which has loaded the interpreter.

    Args:
        listens: whether each has a loopback interface of its own, on which it listens.
    """

    def __init__(self, section: ProcessSandbox, *, listens: bool = False) -> None:
        program = UserProgram(
            _PROGRAM,
            "run",
            memory=parse_size(section.memory),
            jail={**jail_of(section), "listens": listens},
            environment=environment_of(section),
        )
        self._section = section
        self._pool = Pool(program, section.program_seconds, at_once(section), reuse=False)
        self._places = PerLoop(lambda: asyncio.Semaphore(section.concurrency or MOST_OPEN))

    async def run(self, job: SandboxJob) -> SandboxOutcome:
        return await _outcome(self._pool.run(message_of(job, self._section)))

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Opened]:
        async with self._places.here:
            try:
                worker = await self._pool.take()
            except WorkerError as error:
                raise SandboxError(str(error)) from None
            try:
                yield OpenedProcess(worker, self._section)
            finally:
                worker.close()

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True, slots=True)
class OpenedProcess:
    """A worker in a jail."""

    worker: Worker
    section: ProcessSandbox

    @property
    def listener(self) -> socket.socket:
        assert self.worker.listener is not None
        return self.worker.listener

    async def run(self, job: SandboxJob, seconds: float) -> SandboxOutcome:
        return await _outcome(self.worker.ask((message_of(job, self.section),), seconds))


async def _outcome(answer: Awaitable[object]) -> SandboxOutcome:
    try:
        return outcome_of(await answer)
    except DeadlineExceeded:
        return SandboxOutcome("timed_out")
    except WorkerLost as lost:
        if lost.code > 0:  # it did not enter the sandbox
            raise SandboxError(str(lost)) from None
        return SandboxOutcome("killed", lost.code)
    except WorkerError as error:
        raise SandboxError(str(error)) from None
