"""``environment.sandbox``: where code that the policy writes or calls runs, and its limits."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tunesmith.config.choice import Choice
from tunesmith.config.values import Memory, PositiveInt, Size, Text, Url


class Sandbox(Choice):
    """Limits that hold in every kind."""

    what = "sandbox"
    open_to_users = False
    for_python: ClassVar[bool] = False
    """Whether tools and reward functions can run in it, besides programs."""

    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that a program may run."""
    memory: Memory = "512MB"
    """Memory of a process, beyond the loaded interpreter."""
    processes: PositiveInt = 32
    """Processes and threads at once."""
    files: Size = "64MB"
    """Size of the files that it may write, all together."""
    output: Size = "1MB"
    """Output that is kept of a program; one that prints more has failed."""
    concurrency: PositiveInt | None = None
    """Programs that run at once; None: as many as cores."""


class LocalSandbox(Sandbox):
    """A sandbox on this machine."""

    network: bool = False
    """Whether internet sockets can be opened."""
    read: tuple[Text, ...] = ()
    """Further files and directories that can be read."""


class ProcessSandbox(LocalSandbox):
    """Namespaces, Landlock, seccomp and limits of Linux; nothing to install."""

    name = "process"
    use = "Linux, for tools, reward functions and programs"
    for_python = True

    env: tuple[Text, ...] = ()
    """Environment variables that tools and reward functions keep."""


class Bubblewrap(LocalSandbox):
    """Programs in bubblewrap."""

    name = "bubblewrap"
    use = "programs, where bwrap is installed"


class DockerSandbox(Sandbox):
    """Programs in containers that are started ahead."""

    name = "docker"
    use = "programs in an image of your own"

    image: Text = "python:3.12-slim"
    """It has to hold python3."""
    runtime: Text | None = None
    """A container runtime such as "runsc" (gVisor)."""
    network: bool = False
    """Whether containers have a network."""


class HttpSandbox(Sandbox):
    """Programs on a server with the interface of Sandbox Fusion."""

    name = "http"
    use = "programs on other machines"

    url: Url
    """The address of ``run_code``."""
    token_env: Text | None = None
    """The environment variable with the token that is sent as ``Authorization: Bearer``."""
