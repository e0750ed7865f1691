"""Commands in a process in which the rooms behind doors cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HIDDEN = ("guide", "models.cpu", "models.cuda", "records.report", "records.doctor")
HIDE = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        rooms = [f"tunesmith.{{room}}" for room in {HIDDEN}]
        if any(f"{{name}}.".startswith(f"{{room}}.") for room in rooms):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
COMMANDS = """
import contextlib, io, os
from tunesmith.cli.main import app

for arguments in calls:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            app(arguments)
        except SystemExit as ended:
            code = ended.code
    print(f"{code}\\0{output.getvalue()}\\1", end="")
"""


def without_rooms(folder: Path, *calls: list[str]) -> list[tuple[str, str]]:
    """Exit code and output of commands, all in one process that lacks the rooms."""
    code = f"{HIDE}\ncalls = {list(calls)!r}\n{COMMANDS}"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    outputs = ended.stdout.split("\1")[:-1]
    return [(code, text) for code, _, text in (output.partition("\0") for output in outputs)]
