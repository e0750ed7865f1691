"""A reward model in a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tunesmith.cluster.remote import Remote
from tunesmith.errors import TunesmithError
from tunesmith.rewards.function import Score
from tunesmith.rewards.model import RewardModel


class RestartingRemote:
    """Calls to the process of ``start``; one that dies is replaced, ``restarts`` times."""

    def __init__(self, start: Callable[[], Remote], restarts: int, report: Callable[[str], None]) -> None:
        self._start, self._restarts, self._report = start, restarts, report
        self.remote = start()

    def call(self, name: str, *args: Any) -> Any:
        while True:
            remote = self.remote
            try:
                return remote.call(name, *args)
            except TunesmithError as lost:
                if not remote.lost or not self._restarts:
                    raise
                self._restarts -= 1
                self._report(f"{lost}: starting another")
                self.remote = self._start()


@dataclass(frozen=True, slots=True)
class RayRewardModel(RewardModel):
    """Encodes texts here and scores them where ``place`` holds the whole model."""

    place: RestartingRemote | None = None

    @classmethod
    def of(cls, place: RestartingRemote) -> RayRewardModel:
        tokenizer, limit, template, stats = map(
            place.remote.get, ("model.tokenizer", "max_tokens", "template", "stats")
        )
        model: Any = SimpleNamespace(tokenizer=tokenizer)  # all that encoding reads
        return cls(model, limit, template, stats, place)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        assert self.place is not None
        return self.place.call("score", [list(ids) for ids in sequences])
