"""``tunesmith`` as a person runs it: many commands, one after another, in one new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEAVY = ["torch", "transformers", "datasets", "tokenizers"]

MANY = """\
import contextlib, io, json, sys
from tunesmith.cli.main import main
ended = []
for arguments in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["tunesmith", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            code = exit.code
    ended.append([code, out.getvalue(), err.getvalue(), [m for m in HEAVY if m in sys.modules]])
print(json.dumps(ended))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    shown: str
    told: str
    loaded: list[str]


def tunesmith(folder: Path, commands: Sequence[Sequence[str]]) -> list[Ended]:
    """What each command ended with."""
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{MANY}"],
        input=json.dumps(commands), cwd=folder, capture_output=True, text=True, timeout=600,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "140", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Ended(*ended) for ended in json.loads(done.stdout.splitlines()[-1])]
