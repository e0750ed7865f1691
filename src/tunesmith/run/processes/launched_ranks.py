"""The processes of a launch that do not run the command: they serve rank 0 as trainer ranks.

As the first rank such a process starts a child. The first process of each machine starts its
engines as children, whose connections it opens: it keeps one open for the next engine, and rank 0
sends on it what to start.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any, NoReturn

from tunesmith.config.system import Role
from tunesmith.learn.usercode.host import ignore_signals, serve, serve_parent
from tunesmith.plan.cluster import NAMES
from tunesmith.plan.devices import visible_names
from tunesmith.run.processes.launch import MEETING, ChildStart, Launch, machine_view
from tunesmith.run.processes.local import RANKED
from tunesmith.run.processes.machines import Rendezvous, own_view, watched

LEAVING = 10.0
"""Seconds in which a process ends that rank 0 no longer needs, before it is killed."""


def serve_rank(launch: Launch) -> NoReturn:
    """Serve the process that runs the command as a trainer rank, until it closes the connection.

    The first rank of each other machine also starts that machine's engines.
    """
    ignore_signals()
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (rank 0 prints)
    rendezvous = Rendezvous(launch.rank, MEETING) if launch.several_machines else None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if rendezvous and launch.local_rank == 0:  # now, while it sees all GPUs of the machine
        _on_thread(_offer_engine, launch, rendezvous, machine_view(launch), visible)
    if visible is None or visible.count(",") >= launch.local_rank:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_names(visible, launch.local_rank + 1)[-1]
    first, *others = RANKED
    for role in others:  # each on its own thread: rank 0 may never let it in
        _on_thread(_start_role, launch, role, rendezvous)
    serve(_connect(launch, first, rendezvous, own_view()), lost=1)


def _start_role(launch: Launch, role: Role, rendezvous: Rendezvous | None) -> None:
    """Serve a role in a child, once rank 0 asks for it: sharding needs torch.distributed's default
    group, and a process has only one."""
    connection = _connect(launch, role, rendezvous, own_view())
    start = _asked(connection)
    if start:
        name = f"rank {launch.rank} of the {NAMES[role]}"
        code = _serve_in_child(connection, name, start, dict(os.environ))
        if code:
            os._exit(code)


def _offer_engine(
    launch: Launch, rendezvous: Rendezvous, view: Mapping[str, str], visible: str | None
) -> None:
    """Serve as an engine in a child, once rank 0 asks for it; meanwhile another one is offered.

    Args:
        view: the machine's.
        visible: the GPUs that this machine's processes see, as in ``CUDA_VISIBLE_DEVICES``.
    """
    connection = _connect(launch, "rollout", rendezvous, view)
    start = _asked(connection)
    if start:
        _on_thread(_offer_engine, launch, rendezvous, view, visible)
        environment = dict(os.environ)
        if start.gpus is not None:
            names = visible_names(visible, max(start.gpus) + 1)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in start.gpus)
        _serve_in_child(connection, "an engine", start, environment)


def _on_thread(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _asked(connection: Connection) -> ChildStart | None:
    """What rank 0 asks for; None: it has ended without."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _serve_in_child(
    connection: Connection, name: str, start: ChildStart, environment: dict[str, str]
) -> int:
    """Serve a connection in a child until it ends; returns its exit code. The kernel kills it when
    this thread ends.

    When rank 0 has closed the connection, the child has ``LEAVING`` seconds to end.
    """
    end = connection.fileno()
    command = [str(start.python or sys.executable), "-P", "-c", SERVE]
    if start.python is None:
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [*command, str(end), str(os.getpid()), name],
        pass_fds=[end],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    ended = os.pidfd_open(child.pid)
    either = select.poll()
    either.register(ended, select.POLLIN)
    either.register(end, select.POLLRDHUP)
    either.poll()
    os.close(ended)
    try:
        code = child.wait(LEAVING)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    connection.close()
    return code


SERVE = "from tunesmith.run.processes.launched_ranks import serve_role; serve_role()"
"""Called with a connection's descriptor, the id of the parent process, and a name for ``ps``."""


def serve_role() -> NoReturn:
    descriptor, parent = map(int, sys.argv[1:3])
    os.set_inheritable(descriptor, False)
    serve_parent(Connection(descriptor), parent, lost=1)


def _connect(
    launch: Launch, role: Role, rendezvous: Rendezvous | None, view: Mapping[str, str]
) -> Connection:
    deadline = time.monotonic() + MEETING
    while True:
        try:
            if rendezvous:
                connection = watched(rendezvous.reach())
            else:
                if launch.directory.stat().st_uid != os.getuid():
                    raise PermissionError(f"{launch.directory} belongs to another user")
                connection = Client(str(launch.directory / "ranks"), "AF_UNIX")
            connection.send((launch.rank, role, os.getpid(), socket.gethostname(), view))
            return connection
        except (FileNotFoundError, ConnectionRefusedError, AuthenticationError, EOFError):
            if time.monotonic() > deadline:
                sys.exit(f"rank {launch.rank}: rank 0 did not appear within {MEETING:g} s")
            time.sleep(0.05)
