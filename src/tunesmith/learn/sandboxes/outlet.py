"""Where a sandbox hands out a socket that it listens on.

A socket belongs to the network in which it was opened. So who gets the one on which a sandbox
listens serves the programs inside, while these reach nothing else.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable

START_SECONDS = 30.0
_LOOK = 0.05


class Outlet:
    """A socket of this machine, in a directory that the sandbox sees."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tunesmith-outlet-")
        os.chmod(self._folder, 0o711)  # sandboxes run as other users
        self.address = os.path.join(self._folder, "outlet")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        os.chmod(self.address, 0o666)
        self._socket.settimeout(_LOOK)
        self._socket.listen(1)
        self._listener: socket.socket | None = None

    def take(self, alive: Callable[[], bool]) -> socket.socket | None:
        """What was handed out; None if the sandbox is not ``alive``, or takes too long."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and alive():
            try:
                sandbox, _ = self._socket.accept()
            except TimeoutError:
                continue
            with sandbox:
                sandbox.settimeout(START_SECONDS)
                _, handles, _, _ = socket.recv_fds(sandbox, 1, 1)
            self._listener = socket.socket(fileno=handles[0]) if handles else None
            break
        return self._listener

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._listener is not None:
            self._listener.close()
