"""Processes that end with their parent, and the removal of directories that killed processes leave
behind.

Imports only the standard library: a worker started by its file name loads only this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux's <sys/prctl.h>."""


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies for any reason; on Linux
    only.

    A program calls it first, with its parent's ``os.getpid()``, for example from its arguments. It
    also works for a process that is stopped, or that never notices a closed pipe.

    The kernel watches the *thread* that started the process: that thread must live as long as the
    process is needed.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent and not is_alive(parent):  # it died before the prctl call
        os._exit(1)


_removers: dict[int, subprocess.Popen[bytes]] = {}
"""By process number: a forked process needs its own remover."""


def remove_at_end(directory: Path) -> None:
    """Remove a directory when this process ends, even if its whole process group is killed."""
    remover = _removers.get(os.getpid())
    if remover is None:
        # It waits until the kernel closes its input, in a separate session that signals to ours do
        # not reach.
        read = 'while IFS= read -r path; do set -- "$@" "$path"; done'
        script = f'{read}; [ $# -eq 0 ] || rm -rf -- "$@"'
        remover = _removers[os.getpid()] = subprocess.Popen(
            ["/bin/sh", "-c", script, "remover"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    assert remover.stdin is not None
    with suppress(OSError):  # the remover was killed: the next run removes the directory
        remover.stdin.write(os.fsencode(directory) + b"\n")
        remover.stdin.flush()


def owned_name(prefix: str) -> str:
    """A name for a directory that ``remove_stale`` removes once this process has ended."""
    return f"{prefix}{_machine()}-{os.getpid()}-{_started(os.getpid())}-"


def remove_stale(parent: Path, prefix: str) -> list[Path]:
    """Remove directories in ``parent`` that killed processes of this machine created with
    ``owned_name``.

    The start time distinguishes processes with the same number. Directories of other machines or
    containers that share the disk or the memory stay, because their processes are not visible.

    Returns:
        The removed directories.
    """
    removed: list[Path] = []
    for directory in parent.glob(f"{prefix}{_machine()}-*"):
        number, _, rest = directory.name.removeprefix(f"{prefix}{_machine()}-").partition("-")
        if number.isdecimal() and rest.partition("-")[0] != _started(int(number)):
            rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


def _machine() -> str:
    """Identifies this boot of the machine and the process namespace: containers have their own."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{boot}{os.stat('/proc/self/ns/pid').st_ino}"
    return os.uname().nodename


def _started(process: int) -> str:
    """When a process started, in clock ticks since boot; ``gone`` if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "here" if process == os.getpid() or is_alive(process) else "gone"
    # Field 22 of proc(5); the name before it may hold anything.
    return text.rpartition(")")[2].split()[19]


def kill_descendants(process: int) -> None:
    """Kill (SIGKILL) a process's children and theirs; on Linux only."""
    found: list[int] = []
    with suppress(OSError):  # it has ended, or the kernel lists no children
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text("ascii").split())
    for child in found:
        kill_descendants(child)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def is_alive(process: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
