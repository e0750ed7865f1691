"""A reward model in another process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tunesmith.distributed.far import Far
from tunesmith.errors import TunesmithError
from tunesmith.rewards.model import RewardModel


class RestartingFar:
    """Calls methods of a process that ``start`` starts; replaces a lost one, up to ``restarts`` times."""

    def __init__(self, start: Callable[[], Far], restarts: int, report: Callable[[str], None]) -> None:
        self._start, self._restarts, self._report = start, restarts, report
        self.far = start()

    def call(self, name: str, *args: Any) -> Any:
        while True:
            far = self.far
            try:
                return far.call(name, *args)
            except TunesmithError as lost:
                if not far.lost or not self._restarts:
                    raise
                self._restarts -= 1
                self._report(f"{lost}: starting another")
                self.far = self._start()


def far_reward_model(place: RestartingFar) -> RewardModel:
    """A reward model that encodes texts here and scores them in the process of ``place``, which has the whole model."""
    tokenizer, context, template, stats = map(place.far.get, ("tokenizer", "context", "template", "stats"))
    return RewardModel(partial(place.call, "score_ids"), tokenizer, context, template, stats)
