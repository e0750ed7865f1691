"""What user code starts ends with the run."""

from __future__ import annotations

import time
from pathlib import Path

from tunesmith.learn.usercode.killable import ForkServer, UserProgram

STARTS = """\
import subprocess

ours = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE)
there = int(ours.stdout.readline())


def started():
    return [ours.pid, there]
"""


def works(process: int) -> bool:
    """Whether a process has not ended; one that has may wait for its new parent."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_processes_that_a_file_starts_when_it_is_imported_end_with_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(STARTS + "\n\nstarted.description = started()\n")
    server = ForkServer(UserProgram(file, "started"))
    assert server.forks and len(server.description) == 2
    assert all(map(works, server.description))
    server.close()
    until = time.monotonic() + 20.0
    while any(map(works, server.description)):
        assert time.monotonic() < until
        time.sleep(0.01)
