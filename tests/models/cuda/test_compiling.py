"""Triton compiles every kernel for the GPUs that people have, which needs no GPU. Its interpreter
takes programs that its compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")
PROGRAM = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(capability)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {"_attend", "_merge", "_rms_norm", "_heads", "_gated", "_draw", "_sums", "_gradients"}
    assert set(done.stdout.split()) == kernels
