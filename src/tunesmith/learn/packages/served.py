"""Servers of packages: at an address, or started by a run on this machine."""

from __future__ import annotations

import atexit
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from tunesmith.errors import EpisodeError

START_SECONDS = 120.0


def address_in(name: str) -> str:
    """The address that names a server; empty for one that a run starts."""
    return name.rstrip("/") if name.startswith(("http://", "https://")) else ""


class PackageServer:
    """A server; without an address, it is started when it is first needed, and again if it has
    ended.

    Args:
        what: its name in errors.
        command: how it is started on a port of the loopback interface.
        ask: raises OSError as long as nothing answers at its address.
    """

    def __init__(
        self,
        what: str,
        command: Callable[[int], Sequence[str]],
        ask: Callable[[str], object],
        address: str,
    ) -> None:
        self._what = what
        self._command = command
        self._ask = ask
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = address
        self._url = address

    def url(self) -> str:
        """The server's address; raises EpisodeError if it does not start."""
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            if not (self._address or running):
                self._start()
        return self._url

    def _start(self) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(self._command(port), stdout=log, stderr=subprocess.STDOUT)
            self._process = process
            self._wait(process, log)

    def _wait(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        """Return when the server answers."""
        atexit.register(process.kill)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and process.poll() is None:
            try:
                self._ask(self._url)
                return
            except OSError:
                time.sleep(0.1)
        process.kill()
        log.seek(0)
        said = log.read()[-2000:].decode(errors="replace")
        raise EpisodeError(f"{self._what} did not start:\n{said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
