"""The processes of a ``torchrun`` or ``accelerate launch``, as far objects: rank 0 runs the
command, and the others serve it until it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tunesmith.config.system import Role
from tunesmith.errors import NoPlaceError, TrainerLostError, TunesmithError
from tunesmith.learn.usercode.far import Far, Lost
from tunesmith.plan.devices import EnginePlace
from tunesmith.run.processes.launch import ChildStart, Launch
from tunesmith.run.processes.launched_ranks import serve_rank
from tunesmith.run.processes.local import RANKED, LocalProcesses
from tunesmith.run.processes.meeting import Meeting, ServedRank


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
        for far in {*self._running, *self._others}:
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
        first = self._first_rank(self._engines[place])
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
            there = self._engines[place]
            if there.machine:
                start = ChildStart(there.gpus, python)
                return self._meeting.take(role, self._first_rank(there), lost, start)
        return super()._start_at(place, role, lost, python)

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
