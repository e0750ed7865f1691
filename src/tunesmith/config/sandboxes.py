"""``environment.sandbox``: where code that the policy writes or calls runs, and its limits."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tunesmith.config.choice import Choice
from tunesmith.config.values import Memory, PositiveInt, Size, Text, Url

SECONDS = 10.0


class Sandbox(Choice):
    """Limits that hold in every kind."""

    what = "sandbox"
    open_to_users = False
    for_python: ClassVar[bool] = False
    """Whether tools and reward functions can run in it, besides programs."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds that a program may run; None: 10, and an agent's command as long as its episode."""
    memory: Memory = "512MB"
    """Memory of a process, beyond the loaded interpreter."""
    processes: PositiveInt = 32
    """Processes and threads at once."""
    files: Size = "64MB"
    """Size of the files that it may write, all together."""
    output: Size = "1MB"
    """Output that is kept of a program; one that prints more has failed. An agent's is cut."""
    concurrency: PositiveInt | None = None
    """Programs that run at once; None: as many as cores, and agents as
    ``environment.concurrency`` says."""

    @property
    def program_seconds(self) -> float:
        return self.seconds or SECONDS


class LocalSandbox(Sandbox):
    """A sandbox on this machine."""

    network: bool = False
    """Whether internet sockets can be opened, in containers whether they have a network."""
    env: tuple[Text, ...] = ()
    """Environment variables that the code inside keeps."""


class ReadingSandbox(LocalSandbox):
    """A sandbox with files of this machine."""

    read: tuple[Text, ...] = ()
    """Further files and directories that can be read."""


class ProcessSandbox(ReadingSandbox):
    """Namespaces, Landlock, seccomp and limits of Linux; nothing to install."""

    name = "process"
    use = "Linux, for tools, reward functions and programs"
    for_python = True


class Bubblewrap(ReadingSandbox):
    """Programs in bubblewrap."""

    name = "bubblewrap"
    use = "programs, where bwrap is installed"


class DockerSandbox(LocalSandbox):
    """Programs in containers that are started ahead."""

    name = "docker"
    use = "programs in an image of your own"

    image: Text = "python:3.12-slim"
    """It has to hold python3."""
    runtime: Text | None = None
    """A container runtime such as "runsc" (gVisor)."""


class HttpSandbox(Sandbox):
    """Programs on a server with the interface of Sandbox Fusion."""

    name = "http"
    use = "programs on other machines"

    url: Url
    """The address of ``run_code``."""
    token_env: Text | None = None
    """The environment variable with the token that is sent as ``Authorization: Bearer``."""
