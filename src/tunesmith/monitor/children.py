"""Processes that end with the one that started them, and what those leave behind that were killed.

Imports nothing but the standard library: a worker that is started by its file name loads this file alone.
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
    """Have the kernel kill this process (SIGKILL) when its parent dies, however that dies; on Linux only.

    A program calls it first thing, with the ``os.getpid()`` that its parent handed over, for instance as an
    argument. It also reaches a process that is stopped, or that holds its interpreter and reads no closed pipe.

    The kernel watches the *thread* that started the process: start it from one that lives as long as it is needed.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent and not _is_there(parent):  # it died before the kernel was asked
        os._exit(1)


_removers: dict[int, subprocess.Popen[bytes]] = {}
"""By the process they watch: one that was forked has one of its own."""


def remove_at_end(directory: Path) -> None:
    """Have a directory removed when this process ends, also when it is killed with its whole process group."""
    remover = _removers.get(os.getpid())
    if remover is None:
        # It waits for the end of its input, which the kernel closes, in a session that no signal to this one reaches.
        script = 'while IFS= read -r path; do set -- "$@" "$path"; done; [ $# -eq 0 ] || rm -rf -- "$@"'
        remover = _removers[os.getpid()] = subprocess.Popen(
            ["/bin/sh", "-c", script, "remover"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    assert remover.stdin is not None
    with suppress(OSError):  # somebody killed it: what is left is removed by the next run
        remover.stdin.write(os.fsencode(directory) + b"\n")
        remover.stdin.flush()


def owned_name(prefix: str) -> str:
    """A name for a directory that ``remove_stale`` removes once this process is no more."""
    return f"{prefix}{_machine()}-{os.getpid()}-{_started(os.getpid())}-"


def remove_stale(parent: Path, prefix: str) -> list[Path]:
    """Remove directories that processes of this machine made with ``owned_name`` and, being killed, left in ``parent``.

    A process number that was given out again is told by its start. Those of other machines or containers, on a disk
    or in memory that they share, stay: their processes cannot be seen.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    for found in parent.glob(f"{prefix}{_machine()}-*"):
        number, _, rest = found.name.removeprefix(f"{prefix}{_machine()}-").partition("-")
        started = rest.partition("-")[0]
        if number.isdecimal() and started != _started(int(number)):
            rmtree(found, ignore_errors=True)
            removed.append(found)
    return removed


def _machine() -> str:
    """This start of this machine, and the process numbers that are seen: containers have their own."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{boot}{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{os.uname().nodename}"


def _started(process: int) -> str:
    """When a process began, in clock ticks since the machine's start; ``gone`` where there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "here" if process == os.getpid() or _is_there(process) else "gone"
    return text.rpartition(")")[2].split()[19]  # field 22 of proc(5); the name before it may hold anything


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
