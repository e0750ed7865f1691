"""One command in a process of its own, and the packages that it imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def tunesmith(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the command in a process of its own; what it did, and the packages it imported."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('\\0', *(m for m in sys.modules if '.' not in m), "
        "file=sys.stderr))\n"
        "from tunesmith.cli.main import main\n"
        "sys.argv[0] = 'tunesmith'\n"
        "main()\n"
    )
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "140"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    ended.stderr, _, modules = ended.stderr.partition("\0")
    return ended, set(modules.split())
