"""The runner of a configured sandbox."""

from __future__ import annotations

import os
from functools import partial

from tunesmith.config.sandboxes import (
    Bubblewrap,
    DockerSandbox,
    HttpSandbox,
    ProcessSandbox,
    Sandbox,
)
from tunesmith.errors import ConfigError
from tunesmith.learn.sandboxes.base import SandboxRunner
from tunesmith.learn.sandboxes.http import HttpRunner
from tunesmith.learn.sandboxes.process import ProcessRunner
from tunesmith.learn.sandboxes.started import StartedRunner, bubblewrap, docker


def make_runner(section: Sandbox) -> SandboxRunner:
    """Raises ConfigError if the machine lacks what the sandbox needs."""
    match section:
        case ProcessSandbox():
            return ProcessRunner(section)
        case Bubblewrap():
            return StartedRunner(section, partial(bubblewrap, section))
        case DockerSandbox():
            return StartedRunner(section, partial(docker, section))
        case HttpSandbox():
            if section.token_env and not os.environ.get(section.token_env, "").strip():
                raise ConfigError(
                    f"the environment variable {section.token_env} (environment.sandbox.token_env) "
                    "is not set",
                    keys=("environment.sandbox",),
                )
            return HttpRunner(section)
        case _:
            raise AssertionError(section)
