"""The processes of a run on this machine, each with its own GPUs if there are several."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Self

from tunesmith.config.system import Role
from tunesmith.errors import EngineError, NoPlaceError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.learn.usercode.far import Far, Lost
from tunesmith.plan.cluster import NAMES

RANKED: tuple[Role, ...] = ("actor", "critic")
"""Roles in which several processes train one model."""


Placed = tuple[Far, int | None]
"""A process, and its place among those of its role; None: it has none."""


class Starter(ABC):
    """Starts a run's processes, on this machine (``LocalProcesses``) or a Ray cluster
    (``RayCluster``).

    Use as a context manager; leaving it ends them.
    """

    def __init__(self) -> None:
        self._running: dict[Far, tuple[Role, int | None]] = {}
        """The role and place of each process; None: it has none."""
        self._lock = Lock()

    def spawn(self, role: Role, lost: Lost, python: Path | None = None) -> Far:
        """A new process for a role.

        Args:
            lost: the error that its calls raise when the process has ended.
            python: the interpreter of another environment that has Tunesmith.

        Raises:
            EngineError: there is no room for another one.
            NoPlaceError: there was, on a machine that is lost.
        """
        with self._lock:  # engines start at the same time, each in its own place
            far, place = self._start(role, lost, python)
            self._running[far] = role, place
        far.ended.add_done_callback(lambda _: self._running.pop(far, None))
        return far

    def close(self, *roles: Role) -> None:
        """End the processes of these roles."""
        for far, (role, _) in list(self._running.items()):
            if role in roles:
                far.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(*NAMES)

    @abstractmethod
    def _start(self, role: Role, lost: Lost, python: Path | None) -> Placed:
        """A new process, and its place among those of its role."""


class LocalProcesses(Starter):
    """Child processes. When one ends, its GPUs go to the next process of its role.

    Args:
        gpus: for each process of a role, the GPUs that it sees; a role that is missing sees those
            of this process.
    """

    def __init__(self, gpus: Mapping[Role, Sequence[Sequence[str]]] | None = None) -> None:
        super().__init__()
        self._gpus = gpus or {}

    def _start(self, role: Role, lost: Lost, python: Path | None) -> Placed:
        place = self._free_place(role)
        return self._start_at(place, role, lost, python), place

    def _start_at(self, place: int, role: Role, lost: Lost, python: Path | None) -> Far:
        environment = None
        if role in self._gpus:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus[role][place])}
        name = NAMES[role]
        shown = f"rank {place} of the {name}" if role in RANKED else f"the {name}'s process"
        return ChildProcess(shown, lost, python=python, environment=environment)

    def _places(self, role: Role) -> int | None:
        """How many processes of a role there is room for; None: any number may run."""
        return len(self._gpus[role]) if role in self._gpus else None

    def _usable(self, role: Role, place: int) -> bool:
        """Whether a process can run in a place, if no other one does."""
        del role, place
        return True

    def _free_place(self, role: Role) -> int:
        places = self._places(role)
        while True:
            started = list(self._running.items())
            running = {place: far for far, (other, place) in started if other == role}
            numbers = count() if places is None else range(places)
            usable = (place for place in numbers if self._usable(role, place))
            free = next((place for place in usable if place not in running), None)
            if free is not None:
                return free
            ending = [far.ended for far in running.values() if far.lost]
            if not ending:
                what = self._room(role, places)
                gone = sum(not self._usable(role, place) for place in range(places or 0))
                if gone:
                    raise NoPlaceError(f"{what}, {gone} of them on machines that are lost")
                raise EngineError(f"{what}, and none is left for another")
            wait(ending, return_when=FIRST_COMPLETED)

    def _room(self, role: Role, places: int | None) -> str:
        if role not in self._gpus:
            return f"there is room for {places} {NAMES[role]}s"
        size = len(self._gpus[role][0])
        each = "1 GPU" if size == 1 else f"{size} GPUs"
        return f"there are GPUs for {places} {NAMES[role]}s of {each} each"
