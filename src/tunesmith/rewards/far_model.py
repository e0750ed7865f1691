"""A reward model in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def far_reward_model(places: Sequence[RestartingFar]) -> RewardModel:
    """A reward model that encodes texts here and scores them in the processes of ``places``, each of which has the
    whole model and is given its part of a batch."""
    tokenizer, context, template, stats = map(places[0].far.get, ("tokenizer", "context", "template", "stats"))
    return RewardModel(partial(_score, places), tokenizer, context, template, stats)


def _score(places: Sequence[RestartingFar], sequences: list[list[int]]) -> list[float]:
    """The longest sequences are dealt first, so that all processes have about as much to do."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    shares = [share for n in range(len(places)) if (share := order[n :: len(places)])]
    scores = [0.0] * len(sequences)
    with ThreadPoolExecutor(len(places)) as threads:
        calls = [
            threads.submit(place.call, "score_ids", [sequences[i] for i in share])
            for place, share in zip(places, shares, strict=False)
        ]
        for share, call in zip(shares, calls, strict=True):
            for i, score in zip(share, call.result(), strict=True):
                scores[i] = score
    return scores
