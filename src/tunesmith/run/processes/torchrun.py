"""The processes of a ``torchrun`` or ``accelerate launch``, as far objects.

Rank 0 runs the command. The others serve it as trainer ranks until it ends; as the first rank it
starts a child. On one machine they meet at a socket in a directory that only this user can open,
named after their launcher; on several as described in ``machines.py``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import gettempdir
from typing import NoReturn

from tunesmith.config.system import Role
from tunesmith.errors import ConfigError, TrainerLostError, TunesmithError
from tunesmith.learn.usercode.far import PATIENCE, ConnectedFar, Far
from tunesmith.learn.usercode.host import ignore_signals, serve, serve_parent
from tunesmith.plan.cluster import NAMES
from tunesmith.plan.devices import visible_names
from tunesmith.records.children import remove_at_end
from tunesmith.run.processes.local import RANKED, LocalProcesses
from tunesmith.run.processes.machines import (
    Rendezvous,
    differences,
    own_address,
    own_view,
    watched,
)

MEETING = 60.0
"""Seconds that the processes of one launch may take to meet."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher's settings for this process."""

    rank: int
    world: int
    local_world: int
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """None if this process is the only one, or was not started by a launcher."""
        names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        said = {name: environment[name] for name in names if name in environment}
        wrong = [f"{name}={value}" for name, value in said.items() if not value.isdecimal()]
        if wrong:
            raise ConfigError(
                f"the environment has {wrong[0]}, and a launcher such as torchrun sets a number "
                "there"
            )
        world = int(said.get("WORLD_SIZE", "1"))
        if world <= 1 or "RANK" not in said:
            return None
        here = int(said.get("LOCAL_WORLD_SIZE", world))
        rank = int(said["RANK"])
        return cls(rank, world, here, int(said.get("LOCAL_RANK", rank)))

    @property
    def several_machines(self) -> bool:
        return self.local_world < self.world

    @property
    def directory(self) -> Path:
        """Where the processes meet."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Path(gettempdir()) / f"tunesmith-{os.getuid()}-{os.getppid()}-{attempt}"


def serve_rank(launch: Launch) -> NoReturn:
    """Serve the process that runs the command as a trainer rank, until it closes the connection."""
    ignore_signals()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (rank 0 prints)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or visible.count(",") >= launch.local_rank:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_names(visible, launch.local_rank + 1)[-1]
    rendezvous = Rendezvous(launch.rank, MEETING) if launch.several_machines else None
    first, *others = RANKED

    for role in others:  # each on its own thread: rank 0 may never let it in
        threading.Thread(target=_start_role, args=(launch, role, rendezvous), daemon=True).start()
    serve(_connect(launch, first, rendezvous), lost=1)


def _start_role(launch: Launch, role: Role, rendezvous: Rendezvous | None) -> None:
    """Serve a role in a child, once rank 0 asks for it: sharding needs torch.distributed's default
    group, of which a process has only one. The kernel kills the child when this thread ends."""
    connection = _connect(launch, role, rendezvous)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if not same.recv(1, socket.MSG_PEEK):  # rank 0 has ended
            return
    end = connection.fileno()
    name = f"rank {launch.rank} of the {NAMES[role]}"
    command = [sys.executable, "-P", "-c", SERVE, str(end), str(os.getpid()), name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(command, pass_fds=[end], env=environment, stdout=subprocess.DEVNULL)
    connection.close()
    code = child.wait()
    if code:
        os._exit(code)


SERVE = "from tunesmith.run.processes.torchrun import serve_role; serve_role()"
"""Called with a connection's descriptor, the id of the parent process, and a name for ``ps``."""


def serve_role() -> NoReturn:
    descriptor, parent = map(int, sys.argv[1:3])
    os.set_inheritable(descriptor, False)
    serve_parent(Connection(descriptor), parent, lost=1)


def _connect(launch: Launch, role: Role, rendezvous: Rendezvous | None) -> Connection:
    deadline = time.monotonic() + MEETING
    while True:
        try:
            if rendezvous:
                connection = watched(rendezvous.reach())
            else:
                if launch.directory.stat().st_uid != os.getuid():
                    raise PermissionError(f"{launch.directory} belongs to another user")
                connection = Client(str(launch.directory / "ranks"), "AF_UNIX")
            connection.send((launch.rank, role, os.getpid(), socket.gethostname(), own_view()))
            return connection
        except (FileNotFoundError, ConnectionRefusedError, AuthenticationError, EOFError):
            if time.monotonic() > deadline:
                sys.exit(f"rank {launch.rank}: rank 0 did not appear within {MEETING:g} s")
            time.sleep(0.05)


def launched_address() -> str:
    """This machine's address, as the run's other processes reach it without Ray."""
    launch = Launch.of()
    return own_address() if launch and launch.several_machines else "127.0.0.1"


class ServedRank(ConnectedFar):
    """A far object in a process that the launcher started.

    Args:
        pid: the process's id; None if it is on another machine.
    """

    def __init__(
        self, connection: Connection, pid: int | None, name: str, lost: type[TunesmithError]
    ) -> None:
        super().__init__(connection, name, lost, PATIENCE)
        self._number = pid
        self.exit_code = 0
        """The code that the process exits with."""
        self._start()

    def _kill(self) -> None:
        if threading.current_thread() is self._listener:  # it has ended
            return
        self._send(-1, "exit", self.exit_code)  # the launcher would take a signal for a failure
        self._listener.join(5.0)
        if self._number is not None and self._listener.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)

    def _how_it_ended(self) -> str:
        return "ended; the launcher's output says how"


class Meeting:
    """Where rank 0 waits for the others."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        backlog = len(RANKED) * launch.world
        if launch.several_machines:
            self._rendezvous = Rendezvous(launch.rank, MEETING)  # kept: others read from it
            self._listener = self._rendezvous.listen(backlog)
        else:
            shutil.rmtree(launch.directory, ignore_errors=True)
            launch.directory.mkdir(0o700)
            remove_at_end(launch.directory)
            self._listener = Listener(str(launch.directory / "ranks"), "AF_UNIX", backlog)
        self._connected: dict[tuple[Role, int], tuple[Connection, int, str]] = {}

    def take(self, role: Role, rank: int, lost: type[TunesmithError]) -> ServedRank:
        """Accept a rank in a role.

        Raises:
            TrainerLostError: it was taken before: the launcher's processes are not started again.
            ConfigError: it was started with another command, or has other versions of what it
                needs.
        """
        while (
            len(self._connected) < len(RANKED) * (self.launch.world - 1)
            and (role, rank) not in self._connected
        ):
            with suppress(AuthenticationError, EOFError, OSError):  # not from this launch
                connection = watched(self._listener.accept())
                number, offered, pid, machine, view = connection.recv()
                self._connected[offered, number] = connection, pid, machine
                different = differences(own_view(), view)
                if different:
                    raise ConfigError(
                        f"the machines of this launch differ: rank 0 on {socket.gethostname()} and "
                        f"rank {number} on {machine} have {'; '.join(different)}. Make them equal"
                    )
        if (role, rank) not in self._connected:
            raise TrainerLostError(
                f"rank {rank} of the {NAMES[role]} was started by the launcher, and only once"
            )
        connection, pid, machine = self._connected.pop((role, rank))
        place = f" on {machine}" if self.launch.several_machines else ""
        name = f"rank {rank} of the {NAMES[role]} (process {pid}{place})"
        return ServedRank(connection, pid if rank < self.launch.local_world else None, name, lost)


class LaunchedProcesses(LocalProcesses):
    """Child processes, and the launcher's processes for all of the trainer's ranks but the
    first."""

    def __init__(
        self, meeting: Meeting, gpus: Mapping[Role, Sequence[Sequence[str]]] | None = None
    ) -> None:
        super().__init__(gpus)
        self._meeting = meeting

    def __exit__(self, *error: object) -> None:
        for far in self._running:
            # otherwise launchers on other machines would see a success
            if error[0] and isinstance(far, ServedRank):
                far.exit_code = 1
        super().__exit__(*error)

    def _places(self, role: Role) -> int | None:
        """The launcher gave the other ranks their GPUs, some of them on other machines."""
        return None if role in RANKED else super()._places(role)

    def _start_at(
        self, place: int, role: Role, lost: type[TunesmithError], python: Path | None
    ) -> Far:
        if role in RANKED and place:
            return self._meeting.take(role, place, lost)
        return super()._start_at(place, role, lost, python)


_meeting: Meeting | None = None


def join_launch() -> None:
    """Commands call this first. In a launch, it returns only in rank 0."""
    global _meeting
    launch = Launch.of()
    if launch:
        if launch.rank:
            serve_rank(launch)
        _meeting = Meeting(launch)


def meeting() -> Meeting | None:
    """The meeting of the launch of which this process is rank 0."""
    return _meeting
