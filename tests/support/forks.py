"""Processes that start at once: forks of one process that has imported what they import, which
takes seconds.

A fork's parent is the process that asked for it, as with ``subprocess``: it is adopted (prctl(2),
``PR_SET_CHILD_SUBREAPER``), so that exit codes, signals and the end with the parent are the real
ones.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from threading import Lock
from types import ModuleType
from typing import Any

IMPORTED = (
    "peft",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "tunesmith.run.specs.trainers",
    "tunesmith.run.placement.choosing",
    "tunesmith.run.engines.far",
    "tunesmith.run.engines.local.engine",
)
_SET_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux's <sys/prctl.h>."""
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)
_lock = Lock()
_servers: list[socket.socket] = []


class Forked(subprocess.Popen[Any]):
    """A child of this process that the server has made, and the ends of its pipes."""

    def __init__(
        self, command: Sequence[Any], pid: int, out: int | None, err: int | None, text: bool
    ) -> None:
        self.args = command
        self.pid = pid
        self.returncode = None
        self.stdin = None
        how: Any = ("r", -1) if text else ("rb", 0)
        self.stdout, self.stderr = (
            None if end is None else os.fdopen(end, *how) for end in (out, err)
        )
        self.text_mode = text
        self.encoding = None
        self.errors = None
        self._sigint_wait_secs = 0.25
        self._waitpid_lock = Lock()
        self._child_created = True
        self._communication_started = False
        self._input = None


def popen(
    command: Sequence[Any],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    text: bool = False,
    pass_fds: Sequence[int] = (),
    **others: Any,
) -> subprocess.Popen[Any]:
    """``subprocess.Popen``; a child of ``ChildProcess``, ``python -m`` of ours and ``python -c``
    are forks."""
    if not forks(command):
        told: Any = {
            "cwd": cwd,
            "env": env,
            "stdout": stdout,
            "stderr": stderr,
            "text": text,
            "pass_fds": pass_fds,
        }
        return subprocess.Popen(command, **told, **others)
    assert not others.keys() - {"stdin", "bufsize"}, (
        "a fork reads nothing, and is in this process's session"
    )
    out, theirs_out = _ends(stdout, 1)
    err, theirs_err = (None, theirs_out) if stderr == STDOUT else _ends(stderr, 2)
    setup = (
        [str(part) for part in command[1:]],
        str(cwd or os.getcwd()),
        dict(env or os.environ),
        [1, 2, *pass_fds],
    )
    try:
        pid = _order(pickle.dumps(setup), [theirs_out, theirs_err, *pass_fds])
    finally:
        for wanted, end in ((stdout, theirs_out), (stderr, theirs_err)):
            if wanted in (PIPE, DEVNULL):
                os.close(end)
    return Forked(command, pid, out, err, text)


def run(command: Sequence[Any], *, timeout: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` that captures texts."""
    with popen(command, stdout=PIPE, stderr=PIPE, text=True, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def forks(command: Sequence[Any]) -> bool:
    # Imports look for GPUs, and a fork cannot use one that its parent has looked at.
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists() or command[0] != sys.executable:
        return False
    how, what = command[1:3] if len(command) > 2 else ("", "")
    module = how == "-m" and (what == "tunesmith" or what.startswith("benchmarks."))
    return how == "-c" or module or (how == "-P" and Path(what).name == "host.py")


def _ends(wanted: Any, inherited: int) -> tuple[int | None, int]:
    """This process's end of an output, and the other's."""
    if wanted == PIPE:
        return os.pipe()
    if wanted == DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    return None, inherited if wanted is None else wanted.fileno()


def _order(message: bytes, descriptors: Sequence[int]) -> int:
    with _lock:
        server = _servers[0] if _servers else _open()
        _prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [message], descriptors)
            pid = server.recv(100)
        finally:
            _prctl(_SET_SUBREAPER, 0, 0, 0, 0)
    assert pid, "the fork server has ended; what it wrote is above"
    return int(pid)


def _open() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }  # they start threads when imported
    subprocess.Popen(command, stdin=DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    _servers.append(ours)
    return ours


def serve(server: socket.socket, parent: int) -> None:
    from tests.support import late_compiling
    from tunesmith.records.children import end_with_parent

    end_with_parent(parent)
    late_compiling.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is the parent's to answer
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # it warns that a CPU has not all of its kernels
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    config: Any = sys.modules["transformers"]
    config.PreTrainedConfig.__repr__ = object.__repr__  # as in tests/conftest.py
    gc.freeze()  # a fork's collector would copy every page
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"a fork would lack {len(threads) - 1} threads that imports have started"
    )
    while True:
        message, descriptors, *_ = socket.recv_fds(server, 1 << 20, 9)
        if not message:
            return
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            server.send(b"%d" % os.getpid())
            server.close()
            become(message, descriptors)
            sys.exit()
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(message: bytes, descriptors: Sequence[int]) -> None:
    """What ``python`` does with these arguments."""
    gc.enable()
    (how, what, *given), folder, environment, wanted = pickle.loads(message)
    above = [os.dup(descriptor) for descriptor in descriptors]  # none is in the way of another
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(above, wanted, strict=True):
        os.dup2(descriptor, number)
        if descriptor not in wanted:
            os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = ""
    sys.argv[:] = [what if how == "-P" else how, *given]
    if how == "-P":
        runpy.run_path(what, run_name="__main__")
    elif how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(what, vars(main))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
