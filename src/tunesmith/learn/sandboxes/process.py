"""``sandbox = "process"``: forks of a loaded interpreter that Linux confines; see
``usercode.jail``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tunesmith.config.sandboxes import ProcessSandbox
from tunesmith.config.values import parse_size
from tunesmith.errors import ConfigError, DeadlineExceeded
from tunesmith.learn.sandboxes.base import (
    SandboxError,
    SandboxJob,
    SandboxOutcome,
    at_once,
    outcome_of,
)
from tunesmith.learn.usercode.jail import Jail, missing
from tunesmith.learn.usercode.killable import Pool, UserProgram, WorkerError, WorkerLost

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
        raise ConfigError(
            f"environment.sandbox = 'process' cannot confine processes on this machine: {why}. "
            "Use 'bubblewrap', 'docker' or 'http' for programs.",
            keys=("environment.sandbox",),
        )
    return {
        "read": list(section.read),
        "names": [],
        "folder": "",
        "hidden": [os.getcwd(), *map(str, hidden)],
        "files": parse_size(section.files),
        "processes": section.processes,
        "network": section.network,
    }


def environment_of(section: ProcessSandbox) -> dict[str, str]:
    """The environment variables of a confined process: no secrets but those in ``env``."""
    kept = {name: text for name, text in os.environ.items() if name in (*_KEPT, *section.env)}
    locale = {name: text for name, text in os.environ.items() if name.startswith("LC_")}
    return {**kept, **locale, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}


class ProcessRunner:
    """Runs programs in confined forks of one process, which has loaded the interpreter."""

    def __init__(self, section: ProcessSandbox) -> None:
        program = UserProgram(
            _PROGRAM,
            "run",
            memory=parse_size(section.memory),
            jail=jail_of(section),
            environment=environment_of(section),
        )
        self._section = section
        self._pool = Pool(program, section.seconds, at_once(section), reuse=False)

    async def run(self, job: SandboxJob) -> SandboxOutcome:
        given = {
            "code": job.code,
            "command": list(job.command),
            "stdin": job.stdin,
            "files": dict(job.files),
            "output": parse_size(self._section.output),
        }
        try:
            return outcome_of(await self._pool.run(given))
        except DeadlineExceeded:
            return SandboxOutcome("timed_out")
        except WorkerLost as lost:
            if lost.code > 0:  # it did not enter the sandbox
                raise SandboxError(str(lost)) from None
            return SandboxOutcome("killed", lost.code)
        except WorkerError as error:
            raise SandboxError(str(error)) from None

    def close(self) -> None:
        self._pool.close()
