"""Runs the tests that compute as on other kinds of CPU: ``python -m tests.support.kinds
[KIND ...]``; all without names.

Each kind is this CPU within the limits that PyTorch, oneDNN, MKL and PyTorch's compiler follow;
what Tunesmith plans and compiles follows the first two (``plan.facts.instructions``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tunesmith.plan.facts.instructions import Level, highest

TESTS = Path(__file__).parents[1]
KINDS = {
    # With AVX-512 BF16, without AMX: AMD since Genoa, Intel's Cooper Lake.
    "avx512_bf16": (Level.PAIRS, "avx512", "AVX512_CORE_BF16", "AVX512", "cooperlake"),
    "avx512": (Level.AVX512, "avx512", "AVX512_CORE_VNNI", "AVX512", "cascadelake"),
    "avx2": (Level.AVX2, "avx2", "AVX2", "AVX2", "haswell"),
    # PyTorch's operations without AVX, as on a virtual machine that hides it.
    "sse": (Level.SSE, "default", "SSE41", "SSE4_2", "x86-64-v2"),
}
"""What the CPU can do, and the values of ``LIMITS``."""
LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "TORCHINDUCTOR_CPP_MARCH",
)
COMPUTES = re.compile(
    r"^(?:import torch\b|from torch\b|from tests\.support(?:\.| import )(?:tiny\w*|training)\b)",
    re.MULTILINE,
)
ROOMS = ("learn", "models", "plan", "run")
"""Folders of tests whose outcome the CPU may change: others are of words, files and records."""


def files() -> list[str]:
    """The test files that compute: those that use tensors or models."""
    return [
        str(path)
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.relative_to(TESTS).parts[0] in ROOMS
        and COMPUTES.search(path.read_text(encoding="utf-8"))
    ]


def run(kind: str) -> int:
    """The exit status of pytest."""
    level, *limits = KINDS[kind]
    if level >= highest():
        print(f"{kind}: this CPU can do no more than that, so `make test` runs as on this kind")
        return 0
    print(
        f"{kind}:",
        *(f"{name}={limit}" for name, limit in zip(LIMITS, limits, strict=True)),
        flush=True,
    )
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(zip(LIMITS, limits, strict=True))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "3",
        "--dist",
        "worksteal",
        "-m",
        "not slow and not more",
        *files(),
    ]
    status = subprocess.run(command, env=environment, cwd=TESTS.parent, check=False).returncode
    print(f"{kind}: {time.perf_counter() - started:.0f} s, exit status {status}", flush=True)
    return status


def main(kinds: list[str]) -> int:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        print(f"unknown kinds {unknown}; valid: {', '.join(KINDS)}")
        return 2
    return max([run(kind) for kind in kinds or KINDS])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
