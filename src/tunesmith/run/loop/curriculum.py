"""Chooses the next tasks: the loader's order, without tasks that taught nothing last time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.learn.data.loader import Loader, State
from tunesmith.types import RolloutGroup, Task


@dataclass(slots=True)
class Curriculum:
    """Tasks whose group had no contrast rest for ``rest_epochs``, and are then played again.

    By then the policy has changed, and may sometimes solve a task that it never solved before.
    """

    loader: Loader[Task]
    rest_epochs: int = 0
    _rest_until: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """The epoch in which a task may be drawn again, by task id."""
    _unsettled: list[Task] = field(default_factory=list[Task], init=False)
    """Tasks drawn, but neither trained on nor rejected yet. A resumed run draws them first."""
    _again: list[Task] = field(default_factory=list[Task], init=False)
    _place: dict[str, int] = field(init=False)
    """Each task's position in the data, by task id."""

    def __post_init__(self) -> None:
        self._place = {task.id: at for at, task in enumerate(self.loader.items)}

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    @property
    def resting(self) -> int:
        """How many tasks would be left out now."""
        return sum(until > self.epoch for until in self._rest_until.values())

    def next_batch(self, n: int) -> list[Task]:
        drawn = [self._again.pop(0) if self._again else self._next() for _ in range(n)]
        self._unsettled += drawn
        return drawn

    def settle(self, tasks: Sequence[Task]) -> None:
        """Record that these tasks were trained on or their groups rejected."""
        for task in tasks:
            self._unsettled.remove(task)

    def rest(self, groups: Sequence[RolloutGroup]) -> None:
        if self.rest_epochs:
            self._rest_until |= {g.task.id: self.epoch + 1 + self.rest_epochs for g in groups}

    def _next(self) -> Task:
        task = self.loader.take(1)[0]
        for _ in range(len(self.loader)):  # if all tasks rest, none does
            if self._rest_until.get(task.id, 0) <= self.epoch:
                break
            task = self.loader.take(1)[0]
        self._rest_until.pop(task.id, None)
        return task

    def state_dict(self) -> State:
        """The loader's state, and tasks by their position in the data, because the id of a task may
        contain a path."""
        rest_until = [(self._place[name], until) for name, until in self._rest_until.items()]
        unsettled = [self._place[task.id] for task in (*self._unsettled, *self._again)]
        return {**self.loader.state_dict(), "rest_until": rest_until, "unsettled": unsettled}

    def load_state_dict(self, state: State) -> None:
        self.loader.load_state_dict(state)
        tasks = self.loader.items
        self._rest_until = {tasks[at].id: until for at, until in state["rest_until"]}
        self._again = [tasks[at] for at in state["unsettled"]]
