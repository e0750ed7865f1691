"""Where rank 0 of a launch meets its other processes, and takes them as far objects.

On one machine they meet at a socket in a directory that only this user can open, named after their
launcher; on several as described in ``machines.py``. A machine without trainer ranks may be lost
and come back: its processes then come to the same meeting.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge

from tunesmith.config.system import Role
from tunesmith.errors import ConfigError, NoPlaceError, TrainerLostError
from tunesmith.learn.usercode.far import PATIENCE, ConnectedFar, Lost
from tunesmith.plan.cluster import NAMES
from tunesmith.records.children import remove_at_end
from tunesmith.run.processes.launch import ALIKE, MEETING, ChildStart, Launch, machine_view
from tunesmith.run.processes.local import RANKED
from tunesmith.run.processes.machines import Rendezvous, differences, own_view, watched


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
        _hang_up(self._connection)  # on another machine it ends because of this

    def _how_it_ended(self) -> str:
        return "ended; the launcher's output says how"


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A process that has come to the meeting."""

    number: int
    """How many have come before it."""
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
        self._key: bytes | None = None
        if launch.several_machines:
            self._rendezvous = Rendezvous(launch.rank, MEETING)  # kept: others read from it
            self._listener, self._key = self._rendezvous.listen(backlog)
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
            other = next((key for key in keys if self._there[key].differs), None)
            if other:
                why = _differing(other[1], self._there[other])
                for key in keys:
                    self._there.pop(key).connection.close()
                raise NoPlaceError(why)
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
        """Let in whoever comes, each on a thread: one that says nothing keeps no other out."""
        for number in count():
            try:
                connection = watched(self._listener.accept())
            except (ConnectionError, TimeoutError):
                continue  # its machine is gone
            except OSError:  # the listener is closed
                return
            greeting = (number, connection)
            threading.Thread(
                target=self._greet, args=greeting, name="greeting", daemon=True
            ).start()

    def _greet(self, number: int, connection: Connection) -> None:
        late = threading.Timer(MEETING, _hang_up, [connection])
        late.daemon = True
        late.start()
        try:
            if self._key is not None:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            rank, role, pid, host, view = connection.recv()
        except (AuthenticationError, EOFError, OSError):
            return  # not from this launch, or its machine is gone
        finally:
            late.cancel()
        differs = "; ".join(differences(self._own_view(role), view))
        with self._changed:
            known = self._there.get((role, rank))
            if known is None or known.number < number:
                self._there[role, rank] = Newcomer(number, connection, pid, host, differs)
                self._changed.notify_all()

    def _own_view(self, role: Role) -> Mapping[str, str]:
        ranked = role in RANKED
        if ranked not in self._views:
            self._views[ranked] = own_view() if ranked else machine_view(self.launch)
        return self._views[ranked]


def _hang_up(connection: Connection) -> None:
    """End a connection on which another thread may be waiting."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _differing(rank: int, newcomer: Newcomer) -> str:
    cure = "Make them equal"
    if newcomer.differs.startswith("GPUs"):
        cure = (
            "Start the run on machines whose GPUs are alike, or all of them on a Ray cluster "
            '(system.cluster = "ray"), where one kind of GPU trains and another may sample'
        )
    return (
        f"the machines of this launch differ: rank 0 on {socket.gethostname()} and rank {rank} on "
        f"{newcomer.host} have {newcomer.differs}. {cure}"
    )
