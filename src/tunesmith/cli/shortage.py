"""Errors that say that the machine, or a limit of the shell, is short of memory, processes, threads
or open files."""

from __future__ import annotations

import errno
import resource

from tunesmith.errors import (
    LESS_MEMORY,
    DeviceMemoryError,
    TunesmithError,
    UserError,
    is_out_of_memory,
    shortened,
)

_NO_THREAD = ("can't start new thread", "ThreadPoolBuildError", "pthread_create")
"""What Python, the tokenizers' pool and native libraries say."""


def shortage(error: BaseException) -> TunesmithError | None:
    """The error as a sentence with what to do, if something is short that no setting of the run is
    about."""
    if isinstance(error, TunesmithError):
        if isinstance(error, DeviceMemoryError) and (limited := _limited_memory()):
            return DeviceMemoryError(f"{error}. {limited}")
        return None
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return UserError(
            f"{shortened(reason, 1000)}. This shell allows {most} (ulimit -n): raise the limit"
        )
    no_process = isinstance(error, OSError) and error.errno == errno.EAGAIN
    limited = _limited_memory()
    if not limited and (no_process or any(words in reason for words in _NO_THREAD)):
        return UserError(
            f"no further process or thread can be started: {reason}. {_limited_processes()}"
        )
    if not (is_out_of_memory(error) or no_process):
        return None
    advice = (
        limited
        or f"tunesmith plan says what takes it. Try, in this order: {'; '.join(LESS_MEMORY)}"
    )
    return DeviceMemoryError(f"memory ran out: {reason}. {advice}")


def _limited_memory() -> str:
    """What to do about a limit of the address space; empty if there is none."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return ""
    return (
        f"This shell limits the addresses of a process to {most / 1e9:.3g} GB, of which loading "
        "PyTorch takes one or more, and every thread some: raise the limit (ulimit -v unlimited)"
    )


def _limited_processes() -> str:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most == resource.RLIM_INFINITY:
        reached = "A container's limit of processes may be reached (pids.max)"
        return f"{reached}: raise it, or end other processes"
    return (
        f"This user may have {most} processes and threads (ulimit -u): raise the limit, end other "
        "processes, or set system.threads = 1 and OMP_NUM_THREADS=1"
    )
