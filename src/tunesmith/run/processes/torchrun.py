"""The processes of a ``torchrun`` or ``accelerate launch``, as far objects.

Rank 0 runs the command. The others serve it as trainer ranks until it ends; as the first rank it
starts a child. On one machine they meet at a socket in a directory that only this user can open,
named after their launcher; on several as described in ``machines.py``. There the first process of
each machine starts its engines as children, whose connections it opens: it keeps one open for the
next engine, and rank 0 sends on it what to start. A machine without trainer ranks may be lost and
come back: its processes then come to the same meeting.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NoReturn

from tunesmith.config.system import Role
from tunesmith.errors import ConfigError, NoPlaceError, TrainerLostError, TunesmithError
from tunesmith.learn.usercode.far import PATIENCE, ConnectedFar, Far, Lost
from tunesmith.learn.usercode.host import ignore_signals, serve, serve_parent
from tunesmith.plan.cluster import NAMES
from tunesmith.plan.devices import EnginePlace, visible_names
from tunesmith.plan.facts.hardware import read_gpus
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
LEAVING = 10.0
"""Seconds in which a process ends that rank 0 no longer needs, before it is killed."""


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
    def machines(self) -> int:
        return ceil(self.world / self.local_world)

    @property
    def directory(self) -> Path:
        """Where the processes meet."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Path(gettempdir()) / f"tunesmith-{os.getuid()}-{os.getppid()}-{attempt}"


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What a process is started with that a rank starts for rank 0."""

    gpus: tuple[int, ...] | None = None
    """The numbers of the GPUs that it sees, of those of the machine; None: those of the rank."""
    python: Path | None = None
    """The interpreter of another environment that has Tunesmith."""


ALIKE = ChildStart()


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
    group, of which a process has only one."""
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


def machine_view(launch: Launch) -> dict[str, str]:
    """``own_view``, and what else must be equal on machines that have engines."""
    own = {"GPUs": len(read_gpus()), "processes on each machine": launch.local_world}
    return own_view() | {name: str(count) for name, count in own.items()}


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


SERVE = "from tunesmith.run.processes.torchrun import serve_role; serve_role()"
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


def launched_address() -> str:
    """This machine's address, as the run's other processes reach it without Ray."""
    launch = Launch.of()
    return own_address() if launch and launch.several_machines else "127.0.0.1"


class ServedRank(ConnectedFar):
    """A far object in a process that the launcher started, or that such a process has started.

    Args:
        pid: the process's id; None if it is on another machine.
    """

    def __init__(self, connection: Connection, pid: int | None, name: str, lost: Lost) -> None:
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
        if not self._listener.is_alive():
            return
        if self._number is not None:
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # on another machine it ends because of this

    def _how_it_ended(self) -> str:
        return "ended; the launcher's output says how"


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A process that has come to the meeting."""

    connection: Connection
    pid: int
    host: str
    differs: str
    """What its machine has that rank 0's has not; empty: nothing."""


class Meeting:
    """Where rank 0 waits for the others, also for those that come while the run is in progress."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        backlog = (len(RANKED) + 1) * launch.world
        if launch.several_machines:
            self._rendezvous = Rendezvous(launch.rank, MEETING)  # kept: others read from it
            self._listener = self._rendezvous.listen(backlog)
        else:
            shutil.rmtree(launch.directory, ignore_errors=True)
            launch.directory.mkdir(0o700)
            remove_at_end(launch.directory)
            self._listener = Listener(str(launch.directory / "ranks"), "AF_UNIX", backlog)
        self._there: dict[tuple[Role, int], Newcomer] = {}
        self._taken: set[tuple[Role, int]] = set()
        self._changed = threading.Condition()
        self._views: dict[bool, Mapping[str, str]] = {}
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def take(self, role: Role, rank: int, lost: Lost, start: ChildStart = ALIKE) -> ServedRank:
        """Accept a rank in a role, or an engine that the rank starts.

        Raises:
            TrainerLostError: it was taken before: the launcher's processes are not started again.
            ConfigError: it was started with another command, or has other versions of what it
                needs.
            TunesmithError: of the type ``lost``: it has not come.
        """
        key = role, rank
        if key in self._taken and role in RANKED:
            raise TrainerLostError(
                f"rank {rank} of the {NAMES[role]} was started by the launcher, and only once"
            )
        with self._changed:
            self._changed.wait_for(lambda: key in self._there, MEETING)
            newcomer = self._there.pop(key, None)
        if newcomer is None:
            raise lost(f"rank {rank} did not offer a place for the {NAMES[role]}")
        self._taken.add(key)
        if newcomer.differs:
            raise ConfigError(_differing(rank, newcomer))
        if role != RANKED[0]:
            with suppress(OSError):  # it has ended, which its far object notices
                newcomer.connection.send(start)
        return self._served(role, rank, newcomer, start, lost)

    def take_again(self, ranks: Sequence[int]) -> list[ServedRank]:
        """Accept all ranks of a machine that was lost and has been started again; none if not all
        of them have come.

        Raises:
            NoPlaceError: they have other versions of what they need, or another command; they end.
        """
        keys: list[tuple[Role, int]] = [(RANKED[0], rank) for rank in ranks]
        offered: tuple[Role, int] = ("rollout", ranks[0])
        with self._changed:
            for key in (*keys, offered):
                # Nobody sends before rank 0 answers: what can be read is the connection's end.
                if key in self._there and self._there[key].connection.poll():
                    del self._there[key]
            if any(key not in self._there for key in keys):
                return []
            newcomers = [self._there[key] for key in keys]
            differing = [
                _differing(rank, newcomer)
                for rank, newcomer in zip(ranks, newcomers, strict=True)
                if newcomer.differs
            ]
            if differing:
                for key, newcomer in zip(keys, newcomers, strict=True):
                    del self._there[key]
                    newcomer.connection.close()
                raise NoPlaceError(differing[0])
        self._taken.difference_update(keys)
        return [self.take(RANKED[0], rank, TrainerLostError) for rank in ranks]

    def _served(
        self, role: Role, rank: int, one: Newcomer, start: ChildStart, lost: Lost
    ) -> ServedRank:
        if role not in RANKED:
            gpus = "" if start.gpus is None else f", GPU {', '.join(map(str, start.gpus))}"
            name = f"the {NAMES[role]}'s process on {one.host}{gpus}"
            return ServedRank(one.connection, None, name, lost)
        place = f" on {one.host}" if self.launch.several_machines else ""
        name = f"rank {rank} of the {NAMES[role]} (process {one.pid}{place})"
        here = rank < self.launch.local_world
        return ServedRank(one.connection, one.pid if here else None, name, lost)

    def _accept(self) -> None:
        """Let in whoever comes."""
        while True:
            try:
                connection = watched(self._listener.accept())
                rank, role, pid, host, view = connection.recv()
            except (AuthenticationError, EOFError, ConnectionError):  # not from this launch
                continue
            except OSError:  # the listener is closed
                return
            differs = "; ".join(differences(self._own_view(role), view))
            with self._changed:
                self._there[role, rank] = Newcomer(connection, pid, host, differs)
                self._changed.notify_all()

    def _own_view(self, role: Role) -> Mapping[str, str]:
        ranked = role in RANKED
        if ranked not in self._views:
            self._views[ranked] = own_view() if ranked else machine_view(self.launch)
        return self._views[ranked]


def _differing(rank: int, newcomer: Newcomer) -> str:
    return (
        f"the machines of this launch differ: rank 0 on {socket.gethostname()} and rank {rank} on "
        f"{newcomer.host} have {newcomer.differs}. Make them equal"
    )


class LaunchedProcesses(LocalProcesses):
    """Child processes, and the launcher's processes for all of the trainer's ranks but the first.

    On several machines, processes of the launcher that are no trainer ranks wait for the end.

    Args:
        engines: places for engines on all machines of the launch; if there are none, engines are
            child processes.
    """

    def __init__(
        self,
        meeting: Meeting,
        gpus: Mapping[Role, Sequence[Sequence[str]]] | None = None,
        engines: Sequence[EnginePlace] = (),
    ) -> None:
        super().__init__(gpus)
        self._meeting = meeting
        self._engines = engines
        ranks = range(1, meeting.launch.world if engines else 1)
        # An engine's machine is lost with the rank that starts its processes.
        self._others = [meeting.take(RANKED[0], rank, TrainerLostError) for rank in ranks]
        self.check_returned: Callable[[Sequence[Far]], None] = lambda _: None
        """Refuses the processes of a machine that has come back, with an error."""

    @property
    def others(self) -> Sequence[Far]:
        """The launcher's processes other than rank 0, if engines are on several machines."""
        return self._others

    def __exit__(self, *error: object) -> None:
        ranks = {*self._running, *self._others}
        for far in ranks:
            # otherwise launchers on other machines would see a success
            if error[0] and isinstance(far, ServedRank):
                far.exit_code = 1
        super().__exit__(*error)
        for far in self._others:
            far.close()

    def _places(self, role: Role) -> int | None:
        """The launcher gave the other ranks their GPUs, some of them on other machines."""
        if role == "rollout" and self._engines:
            return len(self._engines)
        return None if role in RANKED else super()._places(role)

    def _usable(self, role: Role, place: int) -> bool:
        """Whether the machine of a place is still there, or again."""
        if role != "rollout" or not self._engines:
            return True
        first = self._first_rank(self._engine_place(place))
        return not first or not self._others[first - 1].lost or self._is_back(first)

    def _is_back(self, first: int) -> bool:
        """Whether a lost machine was started again; its processes replace those that are lost.

        Raises:
            NoPlaceError: it was, and differs from the others.
        """
        ranks = range(first, first + self._meeting.launch.local_world)
        returned = self._meeting.take_again(ranks)
        if not returned:
            return False
        try:
            self.check_returned(returned)
        except TunesmithError as error:
            for far in returned:
                far.close()
            raise NoPlaceError(str(error)) from error
        self._others[first - 1 : first - 1 + len(ranks)] = returned
        return True

    def _start_at(self, place: int, role: Role, lost: Lost, python: Path | None) -> Far:
        if role in RANKED and place:
            if self._others and role == RANKED[0]:
                return self._others[place - 1]
            return self._meeting.take(role, place, lost)
        if role == "rollout" and self._engines:
            there = self._engine_place(place)
            if there.machine:
                start = ChildStart(there.gpus, python)
                return self._meeting.take(role, self._first_rank(there), lost, start)
        return super()._start_at(place, role, lost, python)

    def _engine_place(self, place: int) -> EnginePlace:
        return self._engines[place]

    def _first_rank(self, place: EnginePlace) -> int:
        """The first of the launcher's processes on a machine."""
        return place.machine * self._meeting.launch.local_world


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
