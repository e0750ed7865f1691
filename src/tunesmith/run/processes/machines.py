"""How the processes of a launch over several machines meet, and the settings that must be equal on
all of them.

Rank 0 listens on the address by which the others know its machine. It puts this address, and a key
that connections must present, into the launcher's store (``MASTER_ADDR``, ``MASTER_PORT``).
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile, zip_longest
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tunesmith.records.addresses import is_loopback

PACKAGES = ("tunesmith", "torch", "transformers", "peft", "safetensors")
SILENCE = (20, 10, 3)
"""Seconds after which a silent connection is probed, seconds between probes, and how many may go
unanswered."""
ANYWHERE = "192.0.2.1"
"""An address of documentation (RFC 5737); nothing is sent to it."""
_KEY = "tunesmith/meeting/{attempt}"


def own_address() -> str:
    """This machine's address, as the launch's other machines reach it."""
    return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to another.

    Debian resolves a machine's own name to 127.0.1.1, which no other machine reaches: then it is
    the address on the route to anywhere.
    """
    address = _route(host, port)
    if is_loopback(address) and not is_loopback(host):
        with suppress(OSError):  # there is no other network
            return _route(ANYWHERE, port)
    return address


def _route(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


class Rendezvous:
    """The launcher's store."""

    def __init__(self, rank: int, patience: float) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store: Any = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            None,
            is_master=rank == 0 and not hosted,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
        )
        self._key = _KEY.format(attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def listen(self, backlog: int) -> tuple[Listener, bytes]:
        """Listen for the other ranks; also returns the key that each has to present."""
        key = secrets.token_bytes(32)
        listener = Listener((own_address(), 0), "AF_INET", backlog)
        self._store.set(self._key, json.dumps([*listener.address, key.hex()]))
        return listener, key

    def reach(self) -> Connection:
        """Connect to rank 0. Callers may have to retry: the stored address may be from an earlier
        start."""
        host, port, key = json.loads(self._store.get(self._key))
        return Client((host, port), "AF_INET", authkey=bytes.fromhex(key))


def watched(connection: Connection) -> Connection:
    """The connection with keep-alive probes, so that it ends if the other machine disappears
    without a word."""
    idle, interval, count = SILENCE
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if same.family == socket.AF_INET:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            times = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": count}
            for name, value in times.items():
                if hasattr(socket, name):
                    same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def own_view(arguments: Sequence[str] = sys.argv) -> dict[str, str]:
    """The values that must be equal on all machines: versions, the command, the text of its run
    file."""
    view = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            view[name] = version(name)
    files = [text for text in arguments[1:] if text.endswith(".toml") and "=" not in text]
    view["arguments"] = " ".join(text for text in arguments[1:] if text not in files)
    for file in files:
        with suppress(OSError, UnicodeDecodeError):
            view[f"run file {Path(file).name}"] = Path(file).read_text(encoding="utf-8")
    return view


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The differences between two views, with both values; for texts, the first lines that
    differ."""
    found: list[str] = []
    for name in dict.fromkeys([*ours, *theirs]):
        one = ours.get(name, "none")
        other = theirs.get(name, "none")
        if one == other:
            continue
        pairs = list(zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing"))
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        here, there = [*pairs, ("nothing", "nothing")][alike]
        where = f" line {alike + 1}" if len(pairs) > 1 else ""
        found.append(f"{name}{where}: {here!r} and {there!r}")
    return found
