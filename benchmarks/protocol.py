"""The protocol of a measurement: one JSON argument in, one JSON line out.

Every measurement runs in its own process, in the Python environment of the measured system, so this
module and ``workload`` import nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 1800.0
"""Seconds that one measurement may take."""


@dataclass(frozen=True)
class Measure:
    """What to measure: ``repeats`` runs after a warm-up run."""

    system: str
    part: str
    """One of ``peers.PARTS``."""
    workload: str
    dtype: str
    model: str
    """Directory of the workload's model."""
    scratch: str
    """A separate directory for its output."""
    repeats: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Result:
    """The results of a measurement.

    ``seconds`` holds a list of runs for each figure: the part's own name, and names that begin with
    it, such as ``step/rollout``. ``tokens`` are the tokens that one run samples (for training: runs
    through the model). ``facts`` are further values, such as ``limit_share``.
    """

    seconds: dict[str, list[float]]
    tokens: int
    peak_memory_mb: float
    facts: dict[str, float] = field(default_factory=dict[str, float])


def peak_memory_mb() -> float:
    """Peak resident memory of this process, in MB of 10^6 bytes, not counting its parent's."""
    if platform.system() == "Linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def answer(measure: Callable[[Measure], Result]) -> None:
    """The main function of a measuring process."""
    result = measure(Measure(**json.loads(sys.argv[1])))
    print("\n" + json.dumps(asdict(result)), flush=True)


def ask(module: str, measure: Measure, python: str) -> Result:
    """Run a measure in a fresh process of ``python``.

    Raises:
        RuntimeError: the process failed or overran the deadline; the message ends with its last
            output.
    """
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [python, "-m", module, json.dumps(asdict(measure))]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished within {DEADLINE:g} s") from None
    found = [r for r in map(_result, reversed(done.stdout.splitlines())) if r is not None]
    if done.returncode or not found:
        said = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise RuntimeError("\n".join([f"exit code {done.returncode}", *said]))
    return found[0]


def _result(line: str) -> Result | None:
    try:
        fields: Any = json.loads(line)
    except ValueError:
        return None
    known = isinstance(fields, Mapping) and "seconds" in fields
    return Result(**fields) if known else None  # pyright: ignore[reportUnknownArgumentType]
