"""Chooses the next tasks: the loader's order, without tasks that taught nothing last time, and with
those near half right more often."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tunesmith.learn.data.loader import Loader, State
from tunesmith.types import Rollout, RolloutGroup, Task

FORGETTING = 0.5
"""What earlier rollouts of a task count, each time it is played again: the policy changes."""


@dataclass(slots=True)
class Curriculum:
    """Tasks whose group had no contrast rest for ``rest_epochs``, and are then played again.

    By then the policy has changed, and may sometimes solve a task that it never solved before.

    With ``passes`` a task that comes up is taken with the probability ``4 p (1 - p)``, where ``p =
    (right + 1) / (played + 2)`` of its rollouts so far: 1 for a task that is new or half right. The
    draws depend on the loader's seed and position alone.
    """

    loader: Loader[Task]
    rest_epochs: int = 0
    passes: Callable[[Rollout], bool] | None = None
    """Whether a rollout is right; None: all tasks come up alike."""
    _seen: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]], init=False
    )
    """Right and played rollouts, by task id."""
    _rest_until: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """The epoch in which a task may be drawn again, by task id."""
    _unsettled: list[Task] = field(default_factory=list[Task], init=False)
    """Tasks drawn, but neither trained on nor rejected yet. A resumed run draws them first."""
    _again: list[Task] = field(default_factory=list[Task], init=False)
    _pass: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """The epoch in which a task was drawn last, by task id."""
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
        for group in groups if self.rest_epochs else ():
            epoch = self._pass.get(group.task.id, self.epoch)
            self._rest_until[group.task.id] = epoch + 1 + self.rest_epochs

    def learn(self, groups: Sequence[RolloutGroup]) -> None:
        """Record how many rollouts of each task are right."""
        if self.passes is None:
            return
        for group in groups:
            right, played = self._seen.get(group.task.id, (0.0, 0.0))
            right = FORGETTING * right + sum(map(self.passes, group.usable))
            self._seen[group.task.id] = (right, FORGETTING * played + len(group.usable))

    def chance(self, task: Task) -> float:
        """The probability that a task is taken when it comes up."""
        right, played = self._seen.get(task.id, (0.0, 0.0))
        rate = (right + 1) / (played + 2)
        return 4 * rate * (1 - rate)

    def _wanted(self, task: Task, epoch: int) -> bool:
        if self._rest_until.get(task.id, 0) > epoch:
            return False
        if self.passes is None:
            return True
        draw = random.Random(f"{self.loader.seed}/curriculum/{self.loader.drawn}")
        return draw.random() < self.chance(task)

    def _next(self) -> Task:
        for tried in count(1):
            epoch = self.epoch  # the draw of a pass's last task ends the pass
            [task] = self.loader.take(1)
            if self._wanted(task, epoch) or tried > len(self.loader):  # if all rest, none does
                self._rest_until.pop(task.id, None)
                self._pass[task.id] = epoch
                return task
        raise AssertionError("tasks do not end")

    def state_dict(self) -> State:
        """The loader's state, and tasks by their position in the data, because the id of a task may
        contain a path."""
        rest_until = [(self._place[name], until) for name, until in self._rest_until.items()]
        unsettled = [self._place[task.id] for task in (*self._unsettled, *self._again)]
        seen = [(self._place[name], *counts) for name, counts in self._seen.items()]
        own = {"rest_until": rest_until, "unsettled": unsettled, "seen": seen}
        return {**self.loader.state_dict(), **own}

    def load_state_dict(self, state: State) -> None:
        self.loader.load_state_dict(state)
        tasks = self.loader.items
        self._rest_until = {tasks[at].id: until for at, until in state["rest_until"]}
        seen = state.get("seen", ())  # checkpoints before there was a curriculum have none
        self._seen = {tasks[at].id: (right, played) for at, right, played in seen}
        self._again = [tasks[at] for at in state["unsettled"]]
