"""A reward model in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tunesmith.distributed.far import Far
from tunesmith.errors import TunesmithError
from tunesmith.rewards.function import Score
from tunesmith.rewards.model import RewardModel


class RestartingFar:
    """Calls to the process of ``start``. One that ends is replaced, up to ``restarts`` times."""

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


@dataclass(frozen=True, slots=True)
class FarRewardModel(RewardModel):
    """Encodes texts here and scores them where ``place`` holds the whole model."""

    place: RestartingFar | None = None

    @classmethod
    def of(cls, place: RestartingFar) -> FarRewardModel:
        tokenizer, limit, template, stats = map(place.far.get, ("model.tokenizer", "max_tokens", "template", "stats"))
        model: Any = SimpleNamespace(tokenizer=tokenizer)  # all that encoding reads
        return cls(model, limit, template, stats, place)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        assert self.place is not None
        return self.place.call("score", [list(ids) for ids in sequences])
