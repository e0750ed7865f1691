"""The runner of a configured sandbox."""

from __future__ import annotations

import os
from functools import partial

from tunesmith.config.sandboxes import (
    Bubblewrap,
    DockerSandbox,
    HttpSandbox,
    LocalSandbox,
    ProcessSandbox,
    Sandbox,
)
from tunesmith.learn.sandboxes.base import Opener, SandboxRunner, refused
from tunesmith.learn.sandboxes.process import ProcessRunner
from tunesmith.learn.sandboxes.started import StartedRunner, bubblewrap, docker


def make_runner(section: Sandbox) -> SandboxRunner:
    """Raises ConfigError if the machine lacks what the sandbox needs."""
    if isinstance(section, LocalSandbox):
        return make_opener(section, listens=False)
    assert isinstance(section, HttpSandbox)
    if section.token_env and not os.environ.get(section.token_env, "").strip():
        raise refused(
            f"the environment variable {section.token_env} (environment.sandbox.token_env) "
            "is not set"
        )
    from tunesmith.learn.sandboxes.http import HttpRunner  # aiohttp takes a tenth of a second

    return HttpRunner(section)


def make_opener(
    section: LocalSandbox, *, listens: bool = True, folders: tuple[str, ...] = ()
) -> Opener:
    """Raises ConfigError as ``make_runner`` does.

    Args:
        listens: whether the sandboxes have a loopback interface, on which they listen.
        folders: directories in which programs may write, besides the sandbox's own.
    """
    match section:
        case ProcessSandbox():
            return ProcessRunner(section, listens=listens)
        case Bubblewrap():
            return StartedRunner(section, partial(bubblewrap, section, folders), listens=listens)
        case DockerSandbox():
            return StartedRunner(section, partial(docker, section, folders), listens=listens)
        case _:
            raise AssertionError(section)
