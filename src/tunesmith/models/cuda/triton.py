"""Whether Triton's kernels can be launched here."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec


@cache
def usable() -> bool:
    """Triton is installed, and the C compiler with which it builds what launches a kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and find_spec("triton") is not None
