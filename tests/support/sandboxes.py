"""Which kinds of sandboxes this machine has."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

from tunesmith.config.sandboxes import DockerSandbox
from tunesmith.learn.usercode.jail import missing


@cache
def unavailable(kind: str) -> str:
    """Why a kind cannot run here; empty if it can."""
    match kind:
        case "process":
            return missing()
        case "bubblewrap":
            return "" if shutil.which("bwrap") else "bwrap is not installed"
        case _:
            image = DockerSandbox().image
            if shutil.which("docker") is None:
                return "docker is not installed"
            found = subprocess.run(["docker", "image", "inspect", image], capture_output=True)
            return f"no docker daemon has {image}" if found.returncode else ""
