"""Children that start at once: forks of one process that has imported what they all import, which takes seconds.

A fork's parent is the process that asked for it, as with ``subprocess``: it is adopted (prctl(2),
``PR_SET_CHILD_SUBREAPER``), so that exit codes, signals and the end with the parent are the real ones.
"""

from __future__ import annotations

import ctypes
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
from threading import Lock
from types import SimpleNamespace
from typing import Any

IMPORTED = (
    "peft",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "tunesmith.assembly.policy",
    "tunesmith.assembly.processes",
    "tunesmith.engines.far",
    "tunesmith.engines.local.engine",
)
_SET_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux's <sys/prctl.h>."""
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)


class Forked(subprocess.Popen[bytes]):
    """A child of this process that ``ForkServer`` has made."""

    def __init__(self, arguments: Sequence[Any], pid: int, out: int, err: int) -> None:
        self.args, self.pid, self.returncode = arguments, pid, None
        self.stdin, self.stdout, self.stderr = None, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        self._waitpid_lock, self._child_created = Lock(), True


class ForkServer:
    """In the place of the module ``subprocess`` in ``tunesmith.distributed.child``."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.module = SimpleNamespace(**vars(subprocess))
        self.module.Popen = self.start

    def start(
        self, command: Sequence[Any], *, pass_fds: Sequence[int], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[bytes]:
        """``host.py`` of this interpreter in a fork; any other command as always."""
        if command[0] != sys.executable or Path(command[2]).name != "host.py":
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, **how)
        server = self._socket or self._open()
        out, err = os.pipe(), os.pipe()
        host, _, *given = map(str, command[2:])  # the connection has another number there
        message = pickle.dumps((host, given, os.getcwd(), dict(env or os.environ)))
        _prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [message], [pass_fds[0], out[1], err[1]])
            pid = server.recv(100)
        finally:
            _prctl(_SET_SUBREAPER, 0, 0, 0, 0)
            os.close(out[1]), os.close(err[1])
        assert pid, "the fork server has ended; what it wrote is above"
        return Forked(command, int(pid), out[0], err[0])

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._socket = ours
        return ours


def serve(server: socket.socket, parent: int) -> None:
    from tunesmith.monitor.children import end_with_parent

    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is the parent's to answer
    for name in IMPORTED:
        import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lack {len(threads) - 1} threads that imports have started"
    while True:
        message, descriptors, *_ = socket.recv_fds(server, 1 << 20, 3)
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
            become(message, *descriptors)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(message: bytes, connection: int, out: int, err: int) -> None:
    """What the command would have started."""
    host, given, folder, environment = pickle.loads(message)
    for pipe, standard in ((out, 1), (err, 2)):
        os.dup2(pipe, standard)
        os.close(pipe)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [host, str(connection), *given]
    runpy.run_path(host, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
